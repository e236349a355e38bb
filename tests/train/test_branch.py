"""Branches of a run: with other optimiser settings, recorded, resumed, and refused where not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.report.run import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import history, same_state

OTHER = {
    "lr": 0.1,
    "momentum": 0.8,
    "weight_decay": 0.01,
    "warmup_epochs": 1.0,
    "lr_end": 0.1,
    "epochs": 5,
    "accumulate": 2,
    "predictor_lr": "cosine",
}
"""Other optimiser settings than those of ``begun``."""


@pytest.fixture
def begun(small: TrainConfig) -> TrainConfig:
    """A run of 4 epochs, 12 steps, that was stopped after 6."""
    config = with_settings(small, knn_every=0)
    train_here(with_settings(config, max_steps=6), "imagenet")
    return config


@pytest.fixture
def branch(begun: TrainConfig, tmp_path: Path) -> TrainConfig:
    return with_settings(begun, resume=str(tmp_path / "run"), out=str(tmp_path / "branch"))


def recorded(run: Path) -> dict[str, Any]:
    """Return the branch point in a run's config.json."""
    found: dict[str, Any] = json.loads((run / "config.json").read_text()).get("branch", {})
    return found


def test_a_branch_takes_other_optimiser_settings(
    branch: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its rates are those of its settings at each step; nothing of the old ones comes back."""
    run = train_here(with_settings(branch, **OTHER), "imagenet")
    state, origin = checkpoints.load(run), checkpoints.load(tmp_path / "run")
    assert state.step == 15 and state.config.optim.lr == 0.1
    groups = state.optimizer["param_groups"]
    assert {(group["momentum"], group["weight_decay"]) for group in groups} == {(0.8, 0.01)}
    peak = 0.1 * 8 / 256
    rates = [
        peak * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 12)) / 2) for step in range(6, 15)
    ]
    assert [line[5] for line in history(run)] == pytest.approx(rates)
    changed = {name: {"from": to_old(origin, name), "to": value} for name, value in OTHER.items()}
    assert recorded(run) == {
        "run": str(tmp_path / "run"),
        "checkpoint": str(tmp_path / "run" / "checkpoints" / "last.pt"),
        "step": 6,
        "epoch": 2.0,
        "changed": changed,
    }
    said = capfd.readouterr().err
    point = f"{tmp_path / 'run'} after step 6 (epoch 2)"
    assert f"branches off {point}, predictor-lr: constant -> cosine, epochs: 4 -> 5, " in said
    assert ", lr: 0.5 -> 0.1, momentum: 0.9 -> 0.8, " in said
    assert f"learning rate: {0.5 * 8 / 256 * (1 + math.cos(math.pi * 5 / 12)) / 2:.3g} now" in said
    assert f", {rates[0]:.3g} at the next step" in said
    assert checkpoints.load(tmp_path / "run").config == origin.config
    page = write_report([run], tmp_path / "report.html").read_text()
    assert f"branch of {point}: predictor-lr: constant -&gt; cosine, epochs: 4 -&gt; 5" in page


def to_old(origin: checkpoints.Checkpoint, name: str) -> Any:
    """Return a setting of the run that a branch comes from."""
    holder = origin.config.model.method if name == "predictor_lr" else origin.config.optim
    return getattr(holder, name)


def test_the_command_of_a_branch_resumes_it_bit_for_bit(
    branch: TrainConfig, tmp_path: Path
) -> None:
    """Although the run that it comes from is there too, and whatever became of config.json."""
    config = with_settings(branch, **OTHER)
    whole = train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    for stop in (6, 8, 0):
        run = train_here(with_settings(config, max_steps=stop), "imagenet")
        (run / "config.json").unlink()
    run = train_here(config, "imagenet")
    assert history(run) == history(whole) and recorded(run) == recorded(whole)
    one, other = checkpoints.load(run), checkpoints.load(whole)
    assert same_state(one.model, other.model) and same_state(one.optimizer, other.optimizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 6}, r"\(batch: 8 -> 6\); pass the same values, .*--init {run} --out OTHER"),
        ({"lr": 0.1, "jitter_p": 0.5}, r"jitter-p: 0.8 -> 0.5; lr: 0.5 -> 0.1\); "),
        ({"width": 8}, r"width: 4 -> 8\); pass the same values"),
        ({"epochs": 1}, "--epochs 1 is too short for this branch: its checkpoint is after epoch 2"),
    ],
    ids=str,
)
def test_what_a_branch_cannot_change_is_refused(
    settings: dict[str, Any], message: str, branch: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message.format(run=tmp_path / "run")):
        train_here(with_settings(branch, **settings), "imagenet")
    assert not (tmp_path / "branch").exists()


def test_in_place_other_optimiser_settings_are_refused(
    begun: TrainConfig, branch: TrainConfig, tmp_path: Path
) -> None:
    """In the run, and in a branch that has begun with others."""
    way = rf"branch off with other optimizer settings \(--resume {tmp_path / 'run'} --out OTHER"
    with pytest.raises(CheckpointError, match=rf"\(lr: 0.5 -> 0.1\); pass the same values, {way}"):
        train_here(with_settings(begun, lr=0.1), "imagenet")
    train_here(with_settings(branch, lr=0.1, max_steps=7), "imagenet")
    with pytest.raises(CheckpointError, match=rf"\(lr: 0.1 -> 0.2\); pass the same values, {way}"):
        train_here(with_settings(branch, lr=0.2), "imagenet")
    assert checkpoints.load(tmp_path / "branch").step == 7


def test_branches_on_the_command_line(begun: TrainConfig, tmp_path: Path) -> None:
    """With or without the flags that it began with, the command continues with the branch."""
    run, branch = str(tmp_path / "run"), tmp_path / "branch"
    command = ["train", "--resume", run, "--out", str(branch), "--max-steps"]
    changes = ["--lr", "0.1", "--predictor-lr", "cosine"]
    said = fastsiam(*command, "8", *changes).stderr
    assert "lr: 0.5 -> 0.1" in said and "predictor-lr: constant -> cosine" in said
    said = fastsiam(*command, "9", *changes).stderr
    assert "resuming after step 8" in said and "branches off" not in said
    fastsiam_on_ranks(2, *command, "10")
    state = checkpoints.load(branch)
    assert state.step == 10 and state.config.optim.lr == 0.1
    assert recorded(branch)["changed"].keys() == {"lr", "predictor_lr"}
    said = fastsiam(*command, "0", "--lr", "0.2", code=1).stderr
    assert "lr: 0.1 -> 0.2); pass the same values, branch off" in said
