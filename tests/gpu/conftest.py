"""Fixtures of the tests that only a GPU can run."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    """Have each test compile again: dynamo gives up on code that it compiled eight times."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()  # several processes may test on one GPU
