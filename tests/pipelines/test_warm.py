"""Compiling ahead: what is compiled is said, and what cannot be."""

from __future__ import annotations

import pytest
import torch

from fastsiam.errors import BackendError
from fastsiam.kernels import library
from fastsiam.pipelines.warm import warm


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_cpus_kernels_are_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(library, "_load", loaded.append)
    assert list(warm()) == [f"CPU: kernels for {library.kind()}, JPEGs by {library.decoder_name()}"]
    assert loaded == [library.kind()]


def test_kernels_that_cannot_be_compiled_are_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(kind: str) -> None:
        raise BackendError("no C++ compiler found")

    monkeypatch.setattr(library, "_load", fails)
    with pytest.raises(BackendError, match="no C"):
        next(warm())
