"""Fixtures for GPU code that is tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.conftest import import_or_skip

from .fake_gpu import Gpu, fake_gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A machine with a fake GPU. Skipped if there is a real one, which tests/gpu covers."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real GPU")
    with fake_gpu() as gpu:
        yield gpu


class Launch(NamedTuple):
    """The grid and the tensors of a kernel launch."""

    grid: tuple[int, ...]
    tensors: list[Tensor]


@pytest.fixture
def launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record the launches of Triton kernels instead of running them."""
    import_or_skip("triton")
    from triton.runtime.jit import JITFunction

    recorded_launches: list[Launch] = []

    def note(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        recorded_launches.append(Launch(tuple(grid), tensors))

    monkeypatch.setattr(JITFunction, "run", note)
    return recorded_launches
