"""Variants whose methods keep state, resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.run import checkpoint as checkpoints
from tests.configs import flags, with_settings
from tests.methods.variants import EVERY
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.tiers import rest_slow

KEEPING = ["average, 2 steps, asymmetric 2x", "mocov2", "swav, queue", "byol"]


@pytest.mark.parametrize("name", rest_slow(KEEPING, fast=2))
def test_it_goes_on_over_another_number_of_ranks(
    name: str, small: TrainConfig, tmp_path: Path
) -> None:
    """Two steps on one rank, two on two, two on one: rows, queues and encoders of one process."""
    config = EVERY[name].applied(small, epochs=2, lr=0.1, knn_every=0)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    fastsiam("train", *flags(config), "--out", str(whole))
    for world, steps in ((1, 2), (2, 4), (1, 0)):
        part = with_settings(config, max_steps=steps, gpus=world, out=str(moved))
        fastsiam_on_ranks(world, "train", *flags(part))
    expected, found = checkpoints.load(whole), checkpoints.load(moved)
    assert expected.step == found.step == 6
    if "averages" in found.model:
        assert found.model["averages"].abs().sum(1).min() > 0
    torch.testing.assert_close(found.model, expected.model, atol=1e-3, rtol=1e-3)
