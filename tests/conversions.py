"""Helpers that run conversions quietly, inject OS errors and check the results."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import OutputFile, convert, verify
from fastsiam.pipelines.store import Store


def run(kind: str, source: Path | str, out: Path, **options: object) -> list[OutputFile]:
    config = ConvertConfig(source=str(source), out=str(out), **options)  # type: ignore[arg-type]
    return convert(kind, config, Console(quiet=True))  # type: ignore[arg-type]


def assert_same_images(store: Store, other: Store) -> None:
    assert store.classes == other.classes
    np.testing.assert_array_equal(store.labels, other.labels)
    for i in range(len(other)):
        assert bytes(store.read(i)) == bytes(other.read(i))


def find_problems(path: Path, *, decode: bool = True) -> list[str]:
    """Return the problems that ``verify`` reports."""
    try:
        reports = verify(path, decoding=decode, workers=1, console=Console(quiet=True))
    except DataError as error:
        return [str(error)]
    return [line for report in reports for line in report.bad]


def stub_raising(number: int) -> Callable[..., Any]:
    """Return a stand-in for a system call that fails with an ``errno``."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
