"""Fixtures of the benchmark tests."""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

import tests.processes  # noqa: F401  # sets the fork server's preload list
from fastsiam.bench.config import BenchConfig
from tests.conftest import ROOT, write_images


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the fork server of tests and runners in ROOT, where it can import ``tests``."""
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


@pytest.fixture
def bench_config(tmp_path: Path) -> BenchConfig:
    """Settings with 24 images of 40 pixels, 32-pixel views and one repeat."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    return BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=1, device="cpu"
    )
