"""Runs that are resumed, extended or branched off, and the changes of settings that raise."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.errors import CheckpointError
from fastsiam.interchange import export_weights, load_pretrained
from fastsiam.report.run_report import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_on_ranks
from fastsiam.train.start import find_start
from tests.configs import with_settings
from tests.train.runs import assert_same_runs, history, train_run

PEAK = 0.5 * 8 / 256
"""Learning rate at the start of the run."""
NEW_SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.8,
    "weight_decay": 0.01,
    "warmup_epochs": 1.0,
    "lr_end": 0.1,
    "epochs": 5,
    "accumulate": 2,
    "predictor_lr": "cosine",
}
"""Optimizer settings that all differ from those of ``stopped_copy``."""


@pytest.fixture
def branch_config(stopped_copy: TrainConfig, tmp_path: Path) -> TrainConfig:
    return with_settings(stopped_copy, resume=tmp_path / "run", out=tmp_path / "branch")


def cosine(part: float) -> float:
    return (1 + math.cos(math.pi * part)) / 2


def test_branch_uses_new_optimizer_settings(
    branch_config: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each step has the learning rate of the new settings. No old setting remains."""
    run = train_run(branch_config, **NEW_SETTINGS)
    state, origin = checkpoints.load(run), checkpoints.load(tmp_path / "run")
    assert state.step == 15 and state.config.optim.lr == 0.1
    groups = state.optimizer["param_groups"]
    assert {(group["momentum"], group["weight_decay"]) for group in groups} == {(0.8, 0.01)}
    rates = [0.1 * 8 / 256 * (0.1 + 0.9 * cosine((step - 3) / 12)) for step in range(6, 15)]
    assert [line[5] for line in history(run)] == pytest.approx(rates)
    before = origin.config.to_flags()
    assert RunSettings.read(run).branch == {
        "run": str(tmp_path / "run"),
        "checkpoint": str(tmp_path / "run" / "checkpoints" / "last.pt"),
        "step": 6,
        "epoch": 2.0,
        "changed": {
            name: {"from": before[name], "to": value} for name, value in NEW_SETTINGS.items()
        },
    }
    stderr = capfd.readouterr().err
    point = f"{tmp_path / 'run'} after step 6 (epoch 2)"
    assert f"branches off {point}, predictor-lr: constant -> cosine, epochs: 4 -> 5, " in stderr
    assert ", lr: 0.5 -> 0.1, momentum: 0.9 -> 0.8, " in stderr
    assert f"learning rate: {PEAK * cosine(5 / 12):.3g} now" in stderr
    assert f", {rates[0]:.3g} at the next step" in stderr
    assert checkpoints.load(tmp_path / "run").config == origin.config
    for runs in ([run], [tmp_path / "run", run]):
        page = write_report(runs, tmp_path / "report.html").read_text()
        assert f"branch of {point}: predictor-lr: constant -&gt; cosine, epochs: 4 -&gt; 5" in page
    (branch,) = RunSettings.read(run).history(full_paths=False)
    assert branch.startswith("branch of run after step 6 (epoch 2): predictor-lr: constant -> ")


def test_restarted_branch_resumes_bit_for_bit(branch_config: TrainConfig, tmp_path: Path) -> None:
    """It resumes the branch and not the original run, even without config.json.

    The log and a tracker's id of a run that failed before its first checkpoint are removed.
    """
    config = with_settings(branch_config, **NEW_SETTINGS)
    reference = train_run(config, out=tmp_path / "whole")
    left_id = tmp_path / "branch" / "trackers" / "wandb.txt"
    left_id.parent.mkdir(parents=True)
    left_id.write_text("failed")
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "branch")
    for stop in (6, 8, 0):
        run = train_run(config, max_steps=stop)
        (run / "config.json").unlink()
    assert_same_runs(train_run(config), reference)
    assert RunSettings.read(run).branch == RunSettings.read(reference).branch
    assert not left_id.exists() and not [*run.glob("metrics.jsonl.*")]


def test_log_is_kept_if_checkpoints_are_gone(
    small: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two such logs do not overwrite each other. That of a start that saved nothing is removed."""
    run = train_run(small, max_steps=7)
    log, kept = (run / "metrics.jsonl").read_text(), ["metrics.jsonl.old", "metrics.jsonl.old1"]
    first_lines = "".join(log.splitlines(keepends=True)[:3])
    for text, names in ((log, kept[:1]), (log, kept), (first_lines, kept)):
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").write_text(text)
        capfd.readouterr()
        train_run(small, max_steps=1)
        assert sorted(path.name for path in run.glob("metrics.jsonl.*")) == names
        assert ("are gone: its log is kept as" in capfd.readouterr().err) == (text == log)
        assert len(history(run)) == 1
    assert all((run / name).read_text() == log for name in kept)


def test_interrupted_extended_run_resumes_bit_for_bit(
    stopped_copy: TrainConfig, tmp_path: Path
) -> None:
    """Extend and interrupt a run, repeat the command, extend it again: as if uninterrupted."""
    run = tmp_path / "run"
    shutil.copytree(run, tmp_path / "whole")
    reference = train_run(stopped_copy, extend=6, out=tmp_path / "whole")
    for stop in (6, 7, 10, 0):
        train_run(stopped_copy, extend=6, max_steps=stop)
    assert_same_runs(run, reference)
    assert len(history(run)) == 18 and checkpoints.load(run).config.optim.epochs == 6
    rates = [line[5] for line in history(run)]
    assert all(a >= b for a, b in pairwise(rates[6:]))
    train_run(stopped_copy, extend=8)
    assert checkpoints.load(run).step == len(history(run)) == 24
    expected = [PEAK * cosine(step / 24) for step in range(18, 24)]
    assert [line[5] for line in history(run)][18:] == pytest.approx(expected)
    assert [one["step"] for one in RunSettings.read(run).extensions] == [6, 18]
    export_weights(load_pretrained(run), format="plain", out=tmp_path / "w.pt")
    extensions = "from 4 to 6 epochs after epoch 2; extended from 6 to 8 epochs after epoch 6"
    assert f"| history | extended {extensions} |" in (tmp_path / "w.pt.md").read_text()


def test_branch_of_extended_run_has_its_epochs(
    stopped_copy: TrainConfig, branch_config: TrainConfig
) -> None:
    """The warm-up is longer than the run was before it was extended."""
    train_run(stopped_copy, extend=6, max_steps=7)
    branch = RunSettings.read(train_run(branch_config, epochs=6, warmup_epochs=5.0, max_steps=8))
    assert branch.user_config.optim == branch.config.optim
    assert (branch.config.optim.epochs, branch.config.optim.warmup_epochs) == (6, 5.0)


def test_extending_finished_run_prints_learning_rates(
    small: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_run(small)
    capfd.readouterr()
    train_run(small, extend=6)
    assert (
        f"extended from 4 to 6 epochs; learning rate: {PEAK * cosine(11 / 12):.3g} now, "
        f"{PEAK * cosine(12 / 18):.3g} at the next step: a cosine over all 6 epochs"
    ) in capfd.readouterr().err
    state = checkpoints.load(run)
    evaluated = [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"]
    assert state.step == 18 and evaluated == [0, 2, 4, 6]
    assert RunSettings.read(run).config.optim == state.config.optim
    train_run(small, extend=6)
    stderr = capfd.readouterr().err
    assert (
        "nothing left to do: " in stderr
        and "step 18 of 18; pass --extend N to train longer" in stderr
    )


WAY = (
    r"pass the same values, or branch off with other optimizer settings "
    r"\(--resume {run} --out OTHER"
)
BRANCH = {"resume": "{run}", "out": "{new}"}
INVALID_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0.1}, rf"\(lr: 0.5 -> 0.1\); {WAY}"),
    ({"crop": 14}, "crop: 16 -> 14"),
    ({"mixed_with": ("more",)}, "mixed-with: none -> more"),
    ({"resume": "never"}, "already contains a run; pass --resume auto"),
    ({"epochs": 6}, r"epochs: 4 -> 6.*train longer \(--extend EPOCHS\)"),
    ({"extend": 3}, "--extend 3 is less than the run.s 4 epochs"),
    ({"extend": 6, "lr": 0.1}, "lr: 0.5 -> 0.1"),
    ({"extend": 6, "out": "{new}"}, "needs a run to extend"),
    (BRANCH | {"crop": 14}, "crop: 16 -> 14"),
    (
        BRANCH | {"batch": 6},
        r"\(batch: 8 -> 6\); pass the same values, or, with the same backbone, start a new run "
        r"from its weights \(--config {run} --init {run} --out OTHER\)$",
    ),
    (BRANCH | {"lr": 0.1, "jitter_p": 0.5}, r"jitter-p: 0.8 -> 0.5; lr: 0.5 -> 0.1\); "),
    (BRANCH | {"width": 8}, r"width: 4 -> 8\); pass the same values"),
    (BRANCH | {"epochs": 1}, "--epochs 1 is too short for this branch: .* is after epoch 2"),
    (BRANCH | {"epochs": 9, "extend": 7}, "--extend 7 is less than the run.s 9 epochs"),
]
"""Settings for resuming a run that stopped after epoch 2, and the expected error."""


def test_invalid_resume_is_rejected_and_changes_nothing(
    stopped_config: TrainConfig, tmp_path: Path
) -> None:
    run, new = Path(stopped_config.run.out), tmp_path / "new" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for settings, message in INVALID_CHANGES:
        changes: dict[str, Any] = {
            name: x.format(run=run, new=new) if isinstance(x, str) else x
            for name, x in settings.items()
        }
        with pytest.raises(CheckpointError, match=message.format(run=run)):
            train_run(stopped_config, **changes)
        assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert not new.parent.exists(), message


def test_branch_resumes_extends_and_rejects_changes_like_any_run(
    branch_config: TrainConfig, tmp_path: Path
) -> None:
    """Its parent is unchanged, and may have been moved."""
    config, origin = with_settings(branch_config, lr=0.1, extend=5), tmp_path / "run"
    branch = train_run(config, max_steps=7)
    message = rf"\(lr: 0.1 -> 0.2\); {WAY.format(run=origin)}"
    with pytest.raises(CheckpointError, match=message):
        train_run(config, lr=0.2)
    assert checkpoints.load(branch).step == 7
    train_run(config, resume=origin.rename(tmp_path / "moved"))
    assert checkpoints.load(branch).step == 15
    assert checkpoints.load(tmp_path / "moved").config.optim.epochs == 4


def test_branch_behind_its_parent_is_not_overwritten(
    stopped_copy: TrainConfig, branch_config: TrainConfig, tmp_path: Path
) -> None:
    last = checkpoints.last(train_run(branch_config, max_steps=8))
    train_run(stopped_copy, max_steps=8)
    train_run(branch_config, max_steps=9)  # both runs are at the same step: it takes its own
    before = last.read_bytes()
    train_run(stopped_copy)
    with pytest.raises(
        CheckpointError, match=r"branch already contains a run at step 9, before step 12"
    ):
        train_run(branch_config)
    assert last.read_bytes() == before
    older = checkpoints.previous(last.parents[1])
    with pytest.raises(CheckpointError, match=r"previous\.pt is at step 8, but \S+ is at step 9"):
        train_run(branch_config, resume=older)
    with pytest.raises(CheckpointError, match="at step 9, before step 12"):
        train_on_ranks(with_settings(branch_config, gpus=2), "demo", [])
    restarted = find_start(branch_config, last.parents[1], restarts=True).checkpoint
    assert restarted is not None and restarted.step == 9
    train_run(branch_config, resume=last.parents[1])
    assert [line[0] for line in history(tmp_path / "branch")] == list(range(7, 13))


def test_branch_does_not_continue_unrelated_run(
    stopped_copy: TrainConfig, small: TrainConfig, tmp_path: Path
) -> None:
    original, other = Path(stopped_copy.run.out), tmp_path / "other"
    train_run(small, out=other, knn_every=0, max_steps=7)
    before = checkpoints.last(other).read_bytes(), (other / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"other already contains a run that did not branch"):
        train_run(stopped_copy, resume=original, out=other)
    assert before == (checkpoints.last(other).read_bytes(), (other / "config.json").read_bytes())


def test_resolved_precision_is_recorded_and_kept(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolved precision is kept when the run resumes on another CPU."""
    config = with_settings(small, precision="auto")
    for has_amx, steps in ((True, 2), (False, 3)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=has_amx: amx)
        state = checkpoints.load(train_run(config, max_steps=steps))
        assert state.step == steps and state.config.numerics.precision == "bf16"
    with pytest.raises(CheckpointError, match="precision: bf16 -> fp32"):
        train_run(config, precision="fp32")


def test_removed_schedule_prevents_resume_but_not_branch(
    stopped_copy: TrainConfig, branch_config: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such a run can be evaluated and exported, but not resumed with another learning rate."""
    run = Path(stopped_copy.run.out)
    settings = json.loads((run / "config.json").read_text())
    state = torch.load(checkpoints.last(run), weights_only=True)
    longer = {"config": state["config"] | {"optim": state["config"]["optim"] | {"restarts": "2@6"}}}
    for record, checkpoint in ((settings | longer, state), (settings, state | longer)):
        (run / "config.json").write_text(json.dumps(record))
        torch.save(checkpoint, checkpoints.last(run))
        for changes in ({}, {"extend": 6}, {"resume": run}):
            with pytest.raises(CheckpointError, match=r"restart, which was removed .*--out OTHER"):
                train_run(stopped_copy, **changes)
        assert load_pretrained(run).epoch == 2
    capfd.readouterr()
    train_run(branch_config, lr=0.25, max_steps=7)
    assert " now, 0.00391 at the next step" in capfd.readouterr().err
    assert checkpoints.load(train_run(branch_config, lr=0.25, max_steps=8)).step == 8
