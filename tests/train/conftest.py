"""Fixtures for the training tests."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from torch import Tensor

from fastsiam.config import TrainConfig
from fastsiam.train import metrics
from fastsiam.train.metrics import rank_of_gram
from tests.configs import with_settings
from tests.conftest import small_config, write_data
from tests.train.runs import train_run


@pytest.fixture(scope="session")
def stopped_config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of 4 epochs (12 steps), stopped after step 6. Tests must not change it or its data."""
    folder = tmp_path_factory.mktemp("stopped")
    config = small_config(write_data(folder / "data"), folder / "run")
    config = with_settings(config, knn_every=0)
    train_run(config, max_steps=6)
    return config


@pytest.fixture
def stopped_copy(stopped_config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of ``stopped_config`` that a test may change."""
    run = shutil.copytree(stopped_config.run.out, tmp_path / "run")
    return with_settings(stopped_config, out=run)


@pytest.fixture
def slow_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute eigenvalues in a thread, as on a GPU, taking longer than a training step."""

    def slow(gram: Tensor) -> Tensor:
        time.sleep(0.05)
        return rank_of_gram(gram)

    monkeypatch.setattr(metrics, "host_is_idle", lambda device: True)
    monkeypatch.setattr(metrics, "rank_of_gram", slow)
