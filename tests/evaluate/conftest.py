"""A trained run shared by the evaluation tests; each test gets its own copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.conftest import small_config, write_data


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the ``small`` settings, trained for one epoch on 24 train/ and 12 val/ images."""
    folder = tmp_path_factory.mktemp("trained")
    config = small_config(write_data(folder / "data"), folder / "run")
    return train_here(with_settings(config, epochs=1), "imagenet")


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))
