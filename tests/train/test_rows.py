"""Runs of a method with a row for each image: saved, resumed, on ranks, on data that change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsiam.config import TrainConfig
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import train_here
from tests.configs import flags, with_settings
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import history, same_state


@pytest.fixture
def averaging(small: TrainConfig) -> TrainConfig:
    """A run of 12 steps on 24 images, whose targets are each image's average."""
    return with_settings(small, predictor="none", target_average=0.8, knn_every=0)


def rows(run: Path) -> Tensor:
    found: Tensor = checkpoints.load(run).model["averages"]
    return found


def test_they_are_saved_and_resumed_bit_for_bit(averaging: TrainConfig, tmp_path: Path) -> None:
    """From the midst of an epoch; after one each image has a row."""
    whole = train_here(with_settings(averaging, out=str(tmp_path / "whole")), "imagenet")
    run = train_here(with_settings(averaging, max_steps=5), "imagenet")
    assert rows(run).shape == (24, 16) and rows(run).abs().sum(1).min() > 0
    train_here(averaging, "imagenet")
    assert same_state(checkpoints.load(run).model, checkpoints.load(whole).model)
    assert history(run) == history(whole)
    assert not load_pretrained(run).has("predictor")


def test_two_ranks_go_on_on_one_and_one_on_two(averaging: TrainConfig, tmp_path: Path) -> None:
    """Rows and weights are those of one rank, to rounding."""
    config = with_settings(averaging, lr=0.05, max_steps=4)
    parts = {}
    for name, first, then in (("1", 1, 1), ("21", 2, 1), ("12", 1, 2)):
        own = with_settings(config, out=str(tmp_path / name))
        for world, steps in ((first, 2), (then, 4)):
            fastsiam_on_ranks(world, "train", *flags(with_settings(own, max_steps=steps)))
        parts[name] = checkpoints.load(tmp_path / name)
    for name in ("21", "12"):
        assert parts[name].step == 4
        torch.testing.assert_close(parts[name].model, parts["1"].model, atol=1e-4, rtol=1e-3)


def test_they_are_not_sent_about(ranks: Callable[[str, int], list[Any]]) -> None:
    """What differs in a row that no step touches still does, where each rank has BN of its own."""
    assert [part["left"].unique().tolist() for part in ranks("rows_apart", 2)] == [[0.0], [1.0]]
