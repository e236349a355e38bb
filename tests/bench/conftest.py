"""What tests of measuring share."""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

import tests.processes  # noqa: F401  # sets what the server imports
from fastsiam.bench.config import BenchConfig
from tests.conftest import ROOT, write_images


@pytest.fixture(scope="session", autouse=True)
def server_of_all_tests() -> None:
    """Runners are forked from the process that all tests fork from; it finds the tests in ROOT."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


@pytest.fixture
def little(tmp_path: Path) -> BenchConfig:
    """24 images of 40 pixels, views of 32, one repeat."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    return BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=1, device="cpu"
    )
