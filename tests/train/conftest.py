"""Fixtures for the training tests."""

from __future__ import annotations

import time

import pytest
from torch import Tensor

from fastsiam.train import metrics
from fastsiam.train.metrics import rank_of_gram


@pytest.fixture
def slow_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute eigenvalues in a thread, as on a GPU, taking longer than a training step."""

    def slow(gram: Tensor) -> Tensor:
        time.sleep(0.05)
        return rank_of_gram(gram)

    monkeypatch.setattr(metrics, "host_is_idle", lambda device: True)
    monkeypatch.setattr(metrics, "rank_of_gram", slow)
