"""Fixtures for GPU code that is tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from .fake_gpu import Gpu, fake_gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A machine with a fake GPU. Skipped if there is a real one, which tests/gpu covers."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a real GPU")
    with fake_gpu() as gpu:
        yield gpu


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a kernel launch."""

    grid: tuple[int, ...]
    args: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [arg for arg in self.args if isinstance(arg, Tensor)]


@pytest.fixture
def launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record the launches of Triton kernels instead of running them."""
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    recorded_launches: list[Launch] = []

    def note(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        recorded_launches.append(Launch(tuple(grid), args))

    monkeypatch.setattr(JITFunction, "run", note)
    return recorded_launches
