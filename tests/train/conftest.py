"""Fixtures of the tests of training."""

from __future__ import annotations

import time

import pytest
from torch import Tensor

from fastsiam.train import monitor
from fastsiam.train.collapse import rank_of_gram


@pytest.fixture
def slow_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a thread find them, as on a GPU, longer than a step takes."""

    def slow(gram: Tensor) -> Tensor:
        time.sleep(0.05)
        return rank_of_gram(gram)

    monkeypatch.setattr(monitor, "host_is_idle", lambda device: True)
    monkeypatch.setattr(monitor, "rank_of_gram", slow)
