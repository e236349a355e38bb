"""A run made longer: exact when interrupted, and in whatever way it is taken up again."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.train.runs import history, same_state


@pytest.fixture
def begun(small: TrainConfig) -> TrainConfig:
    """A run of 4 epochs, 12 steps, that has begun: stopped after 6 steps."""
    config = with_settings(small, knn_every=0)
    train_here(with_settings(config, max_steps=6), "imagenet")
    return config


def test_an_extended_run_is_exact_when_interrupted(begun: TrainConfig, tmp_path: Path) -> None:
    """Extended and interrupted at once; by the same command; extended again; against one piece."""
    run = tmp_path / "run"
    longer = with_settings(begun, extend=6)
    shutil.copytree(run, tmp_path / "whole")
    train_here(with_settings(longer, out=str(tmp_path / "whole")), "imagenet")

    for stop in (6, 7, 10, 0):
        train_here(with_settings(longer, max_steps=stop), "imagenet")
    assert history(run) == history(tmp_path / "whole") and len(history(run)) == 18
    one, other = checkpoints.load(run), checkpoints.load(tmp_path / "whole")
    assert same_state(one.model, other.model) and same_state(one.optimizer, other.optimizer)
    assert one.config.optim.epochs == 6
    rates = [line[5] for line in history(run)]
    assert all(a >= b for a, b in pairwise(rates[6:]))

    again = with_settings(longer, extend=8)
    train_here(again, "imagenet")
    assert checkpoints.load(run).step == 24 and len(history(run)) == 24
    peak = begun.optim.lr * begun.optim.batch / 256
    expected = [peak * (1 + math.cos(math.pi * step / 24)) / 2 for step in range(18, 24)]
    assert [line[5] for line in history(run)][18:] == pytest.approx(expected)


def test_a_finished_run_goes_on_and_says_what_becomes_of_the_rate(
    small: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_here(small, "imagenet")
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"epochs: 4 -> 6.*train longer \(--extend EPOCHS\)"):
        train_here(with_settings(small, epochs=6), "imagenet")
    train_here(with_settings(small, extend=6), "imagenet")
    said = capfd.readouterr().err
    peak = small.optim.lr * small.optim.batch / 256
    now, after = (peak * (1 + math.cos(math.pi * at)) / 2 for at in (11 / 12, 12 / 18))
    assert (
        f"extended from 4 to 6 epochs; learning rate: {now:.3g} now, {after:.3g} at the next step: "
        "a cosine over all 6 epochs" in said
    )
    assert checkpoints.load(run).step == 18
    evaluated = [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"]
    assert evaluated == [0, 2, 4, 6]
    recorded = TrainConfig.from_dict(json.loads((run / "config.json").read_text())["config"])
    assert recorded.optim == checkpoints.load(run).config.optim
    train_here(with_settings(small, extend=6), "imagenet")
    said = capfd.readouterr().err
    assert "nothing left to do: " in said and "at step 18 of 18; --extend N trains longer" in said


def test_what_cannot_be_extended_is_refused_and_left_alone(
    begun: TrainConfig, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.glob("run/*.json*")}
    for settings, message in (
        ({"extend": 3}, "--extend 3 is less than the run.s 4 epochs"),
        ({"extend": 6, "lr": 0.1}, "lr: 0.5 -> 0.1"),
        ({"extend": 6, "out": str(tmp_path / "none")}, "needs a run to extend"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train_here(with_settings(begun, **settings), "imagenet")
    assert before == {path: path.read_bytes() for path in tmp_path.glob("run/*.json*")}
    assert checkpoints.load(tmp_path / "run").config.optim.epochs == 4


def test_a_branch_can_be_longer(begun: TrainConfig, tmp_path: Path) -> None:
    branch = with_settings(begun, out=str(tmp_path / "b"), resume=str(tmp_path / "run"), extend=5)
    train_here(with_settings(branch, max_steps=8), "imagenet")
    train_here(branch, "imagenet")
    assert checkpoints.load(tmp_path / "b").step == 15
    assert checkpoints.load(tmp_path / "run").config.optim.epochs == 4


def test_a_run_of_0_2_with_the_removed_schedule_branches_off(
    begun: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is evaluated and exported, and is not resumed with another learning rate."""
    run, branch = tmp_path / "run", tmp_path / "branch"
    settings = json.loads((run / "config.json").read_text())
    state = torch.load(checkpoints.last(run), weights_only=True)
    del state["digest"]
    longer = {"config": state["config"] | {"optim": state["config"]["optim"] | {"restarts": "2@6"}}}
    for record, checkpoint in ((settings | longer, state), (settings, state | longer)):
        (run / "config.json").write_text(json.dumps(record))
        torch.save(checkpoint, checkpoints.last(run))
        for own in ({}, {"extend": 6}, {"resume": str(run)}):
            with pytest.raises(CheckpointError, match=r"restart, which was removed .*--out OTHER"):
                train_here(with_settings(begun, **own), "imagenet")
        assert load_pretrained(run).epoch == 2
    capfd.readouterr()
    other = {"resume": str(run), "out": str(branch), "lr": 0.25, "max_steps": 7}
    train_here(with_settings(begun, **other), "imagenet")
    assert " now, 0.00391 at the next step" in capfd.readouterr().err
    train_here(with_settings(begun, **other | {"max_steps": 8}), "imagenet")
    assert checkpoints.load(branch).step == 8
