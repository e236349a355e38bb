"""A trained run that evaluations share; each test gets its own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.conftest import small_config, write_data


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch of the run of ``small`` on images with train/ (24) and val/ (12)."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_config(write_data(folder / "data"), folder / "run")
    return train_here(with_settings(config, epochs=1), "imagenet")


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))
