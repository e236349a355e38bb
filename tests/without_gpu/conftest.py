"""Fixtures of the tests that show of the GPU's code what a machine without one can show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .fake_gpu import Gpu, fake_gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A machine that seems to have a GPU; where there is one, tests/gpu has more to say."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU")
    with fake_gpu() as gpu:
        yield gpu
