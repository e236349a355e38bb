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

LOST, NAME = 9, "class1/001.jpg"


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


def test_an_image_that_is_shown_elsewhere_takes_its_row_along(
    averaging: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """Once, with the consent: before a step is taken, and no more when the run continues."""
    config = with_settings(averaging, max_steps=5)
    before = rows(train_here(config, "imagenet"))
    (images / "train" / NAME).unlink()
    run = train_here(with_settings(config, data_changed="accept"), "imagenet")
    expected = before.clone()
    expected[LOST] = before[LOST + 1]
    assert torch.equal(rows(run), expected) and not torch.equal(before, expected)
    state = checkpoints.load(run)
    state.model["averages"][LOST] = 3.0
    checkpoints.save(checkpoints.last(run), state)
    train_here(config, "imagenet")
    assert (rows(run)[LOST] == 3).all()
    train_here(averaging, "imagenet")
    assert checkpoints.load(run).step == 12 and not (rows(run)[LOST] == 3).any()


def test_a_branch_has_the_rows_of_what_it_is_shown(
    averaging: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """The run that it comes from keeps its own."""
    run = train_here(with_settings(averaging, max_steps=5), "imagenet")
    before = rows(run)
    (images / "train" / NAME).unlink()
    branch = with_settings(
        averaging, resume=str(run), out=str(tmp_path / "branch"), data_changed="accept", max_steps=5
    )
    after = rows(train_here(branch, "imagenet"))
    assert torch.equal(after[LOST], before[LOST + 1]) and torch.equal(rows(run), before)


def test_held_out_images_have_none(averaging: TrainConfig, images: Path) -> None:
    config = with_settings(averaging, data=str(images / "train"), holdout="25%", batch=6)
    found = rows(train_here(config, "imagenet"))
    assert found.shape == (18, 16) and found.abs().sum(1).min() > 0
