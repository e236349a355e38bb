"""Runs that are shuffled within a window: resumed, in other containers, by any pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import ConvertConfig, TrainConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.store import base
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from fastsiam.train.verify import verify
from tests.configs import flags, with_settings
from tests.pipelines.cases import PIPELINES, readable
from tests.ranks import fastsiam_on_ranks
from tests.sources import folder_members, tar


@pytest.fixture
def shuffled(small: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run of 12 steps on 24 images in 6 blocks, within windows of 7 images."""
    monkeypatch.setattr(base, "BLOCK_IMAGES", 4)
    return with_settings(small, shuffle="window:7", knn_every=0, tracker="none")


def digests(run: Path) -> list[Any]:
    return [line["seen"] for line in read_metrics(run) if line["kind"] == "train"]


def verified(run: Path, **settings: Any) -> str:
    return "\n".join(verify(run, VerifyConfig(**settings)))


def test_in_any_container_a_run_goes_on_in_the_order_that_it_began_with(
    shuffled: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """Though the images lie otherwise in each, so that new runs of them have other orders."""
    whole = train_here(with_settings(shuffled, out=str(tmp_path / "whole")), "imagenet")
    convert_data("folder", ConvertConfig(source=str(images), out=str(tmp_path / "converted")))
    other = tar(tmp_path / "other.tar", folder_members(images / "train")[::-1])
    for number, place in enumerate((images, tmp_path / "converted", other, images), 1):
        stop = with_settings(shuffled, data=str(place), max_steps=3 * number - 1)
        train_here(stop, "imagenet")
    run = train_here(shuffled, "imagenet")
    assert digests(run) == digests(whole)
    assert "12 log lines agree" in verified(run)
    assert "12 log lines agree" in verified(run, data=str(other))
    turned = with_settings(shuffled, data=str(other), out=str(tmp_path / "turned"))
    assert digests(train_here(turned, "imagenet")) != digests(whole)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_shows_that_order(name: str, shuffled: TrainConfig) -> None:
    data = str(readable(name, Path(shuffled.data.data)))
    config = with_settings(shuffled, pipeline=name, data=data, max_steps=4)
    assert "4 log lines agree" in verified(train_here(config, "imagenet"))


def test_two_ranks_show_it_together(small: TrainConfig) -> None:
    config = with_settings(small, shuffle="window:7", gpus=2, knn_every=0, max_steps=3)
    fastsiam_on_ranks(2, "train", *flags(config))
    assert "3 log lines agree" in verified(Path(config.run.out))
