"""Runs on a mixture of data sets: shown, resumed, verified, evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.train.command import train_here
from tests.configs import flags, with_settings
from tests.processes import fastsiam
from tests.train.test_shuffle import digests, verified


@pytest.fixture
def mixed(small: TrainConfig, images: Path, tmp_path: Path) -> TrainConfig:
    """A run on a folder of three classes and on one of a single class, half and half."""
    alone = tmp_path / "alone" / "train"
    shutil.copytree(images / "train" / "class1", alone / "class1")
    return with_settings(
        small, mixed_with=(str(alone.parent),), weights=(1, 1), knn_every=0, tracker="none"
    )


def test_a_run_on_a_mixture_resumes_exactly_and_can_be_verified(
    mixed: TrainConfig, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = train_here(with_settings(mixed, out=str(tmp_path / "whole")), "imagenet")
    assert "mixture of 50.0% " in capfd.readouterr().err
    train_here(with_settings(mixed, max_steps=5), "imagenet")
    run = train_here(mixed, "imagenet")
    assert digests(run) == digests(whole)
    assert "agree" in verified(run)
    with pytest.raises(CheckpointError, match=r"weights: 1\.0,1\.0 -> 1\.0,2\.0"):
        train_here(with_settings(mixed, weights=(1, 2)), "imagenet")


def test_an_image_that_is_lost_is_named(mixed: TrainConfig) -> None:
    train_here(with_settings(mixed, max_steps=3), "imagenet")
    next(Path(mixed.data.mixed_with[0]).glob("train/*/*.jpg")).unlink()
    with pytest.raises(CheckpointError, match=r"1 of \d+ images missing \(1/class1"):
        train_here(mixed, "imagenet")


def test_on_the_command_line_data_sets_are_named_one_by_one(mixed: TrainConfig) -> None:
    assert flags(mixed).count("--data") == 2
    fastsiam("train", *flags(mixed), "--max-steps", "1")
    config = json.loads((Path(mixed.run.out) / "config.json").read_text())["config"]
    assert config["data"]["mixed_with"] == list(mixed.data.mixed_with)
