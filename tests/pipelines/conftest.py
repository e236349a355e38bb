"""Fixtures of the pipeline tests: loaders that are closed afterwards, and DALI without checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pipelines.cases import open_loader
from tests.pipelines.dali_cases import skip_dali_checks

Loaders = Callable[..., Any]


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    """Open loaders like ``cases.open_loader``, and close them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *a, **k: stack.enter_context(contextlib.closing(open_loader(*a, **k)))


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass DALI every image that PIL can open, including GIFs, which DALI rejects."""
    skip_dali_checks(monkeypatch)
