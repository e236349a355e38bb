"""Fixtures for tests that need a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from PIL import Image

from fastsiam.config import TrainConfig
from tests.configs import with_settings
from tests.pipelines.conftest import loaders, trusting  # noqa: F401


@pytest.fixture
def gpu(small: TrainConfig) -> TrainConfig:
    return with_settings(small, device="cuda", precision="auto")


@pytest.fixture(scope="module")
def photographs(real_images: Path) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in sorted(real_images.glob("*/*.JPEG"))[:64]]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    """Reset dynamo for each test: it stops compiling code that it has compiled eight times."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()  # several test processes may share a GPU
