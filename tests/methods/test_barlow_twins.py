"""A method that somebody adds: one file and one line, and all else follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam import cli
from fastsiam.config import METHOD_CONFIGS, ModelConfig, TrainConfig
from fastsiam.interchange import load_pretrained
from fastsiam.methods import build_method
from fastsiam.run import checkpoint as checkpoints
from tests import rank_jobs
from tests.configs import with_settings
from tests.methods.barlow_twins import BarlowTwinsConfig
from tests.methods.linear import batch_of, build
from tests.train.runs import history, run_once, run_until, same_state


@pytest.fixture
def config(small: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run of 12 steps."""
    monkeypatch.setitem(METHOD_CONFIGS, BarlowTwinsConfig.name, BarlowTwinsConfig)
    model = ModelConfig(
        backbone="resnet10", stem="cifar", width=4, method=BarlowTwinsConfig(dim=16)
    )
    return replace(with_settings(small, knn_every=0), model=model)


def test_the_loss_is_the_papers() -> None:
    method = build(BarlowTwinsConfig(dim=6))
    batch = batch_of(2)
    loss = method(batch.views, batch.index).loss.item()
    with torch.no_grad():
        z = [method.projector(method.backbone(view)).numpy() for view in batch.views]
    first, second = ((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) for x in z)
    correlation = first.T @ second / len(first)
    weights = np.where(np.eye(6) == 1, 1.0, 5e-3)
    assert loss == pytest.approx((weights * (correlation - np.eye(6)) ** 2).sum(), rel=1e-5)


def test_it_is_killed_resumed_and_exported(config: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(config, save_every=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = checkpoints.load(run_once(config, whole))
    run_until(config, killed, 5)
    state = checkpoints.load(run_once(config, killed, start=checkpoints.load(killed)))
    assert same_state(state.model, expected.model) and history(killed)[-1] == history(whole)[-1]
    file = tmp_path / "plain.pt"
    cli.app(["export", str(whole), "--format", "plain", "--out", str(file)], standalone_mode=False)
    read = load_pretrained(file).part("backbone")
    assert read and all(torch.equal(value, expected.model[key]) for key, value in read.items())


def test_two_ranks_are_one(config: TrainConfig, ranks: Callable[[str, int], list[Any]]) -> None:
    parts, whole = ranks("barlow_twins", 2), rank_jobs.barlow_twins(0, 1)
    for name in ("state", "loss"):
        torch.testing.assert_close(parts[0][name], parts[1][name], atol=0, rtol=0)
        torch.testing.assert_close(parts[0][name], whole[name], atol=2e-5, rtol=1e-4)


def test_it_is_built_by_its_name(config: TrainConfig) -> None:
    assert type(build_method(config.model)).__name__ == "BarlowTwins"
    assert TrainConfig.from_dict(config.to_dict()) == config
