"""What tests of measuring share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastsiam.bench.config import BenchConfig
from tests.bench.contenders import forked
from tests.conftest import write_images


@pytest.fixture
def forked_contenders() -> Iterator[None]:
    """Contenders are forked, not spawned."""
    with forked():
        yield


@pytest.fixture
def little(tmp_path: Path) -> BenchConfig:
    """24 images of 40 pixels, views of 32, two repeats."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    return BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=2, device="cpu"
    )
