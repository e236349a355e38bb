"""A run that was killed or stopped resumes exactly; one that cannot is left as it is."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from fastsiam.train.monitor import LogPoints
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import PIPELINES, readable
from tests.processes import command, fastsiam
from tests.train.runs import history, history_of, run_once, run_until, same_state

# The first of the two resumes mid-epoch, the second at the start of an epoch.
KILLS = (5, 7)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_killed_and_resumed_run_is_bit_identical(
    pipeline: str, small: TrainConfig, tmp_path: Path
) -> None:
    """With a checkpoint every 2 steps; 12 steps in 4 epochs."""
    data = str(readable(pipeline, Path(small.data.data)))
    config = with_settings(small, pipeline=pipeline, data=data, save_every=2)
    whole = run_once(config, tmp_path / "whole").parents[1]
    assert checkpoints.load(whole).step == 12 and len(history(whole)) == 12
    for kill_at in KILLS:
        run = tmp_path / f"killed{kill_at}"
        run_until(config, run, kill_at)
        check_resumed(config, run, kill_at, whole)


def test_any_step_can_be_the_last_one_before_a_kill(small: TrainConfig, tmp_path: Path) -> None:
    """One run, whose files are copied before every step: what a kill there would have left."""
    config = with_settings(small, save_every=2)
    whole = tmp_path / "whole"

    def copy(step: int, batch: Batch) -> None:
        shutil.copytree(whole, tmp_path / f"killed{step}")

    run_once(config, whole, before=copy)
    assert checkpoints.load(whole).step == 12 and len(history(whole)) == 12
    for kill_at in range(1, 12):
        check_resumed(config, tmp_path / f"killed{kill_at}", kill_at, whole)


def check_resumed(config: TrainConfig, run: Path, kill_at: int, whole: Path) -> None:
    """Continue with a run that ended before a step, and hold it against one that did not."""
    expected, last = checkpoints.load(whole), checkpoints.last(run)
    start = checkpoints.load(last) if last.exists() else None
    assert (start.step if start else 0) == kill_at // 2 * 2
    state = checkpoints.load(run_once(config, run, start=start))
    assert same_state(state.model, expected.model), kill_at
    assert same_state(state.optimizer, expected.optimizer), kill_at
    assert history(run) == history(whole), kill_at


def test_lines_that_come_late_are_neither_lost_nor_doubled(
    small: TrainConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed between a log point and its line, whose checkpoint is there already, and resumed."""
    config = with_settings(small, save_every=2, log_every=3)
    whole = history_of(config, tmp_path / "whole")
    request.getfixturevalue("slow_eigenvalues")
    assert history_of(config, tmp_path / "late") == whole
    for kill_at in (3, 5, 10):
        run = tmp_path / f"killed{kill_at}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogPoints, "close", lambda points: None)  # nothing is written any more
            run_until(config, run, kill_at)
        start = checkpoints.load(run)
        assert start.step == kill_at // 2 * 2
        saved = [line for line in whole if line[0] <= start.step]
        assert history(run)[: len(saved)] == saved
        run_once(config, run, start=start)
        assert history(run) == whole


def test_the_resume_test_would_notice_another_order(small: TrainConfig, tmp_path: Path) -> None:
    other = with_settings(small, seed=1)
    assert history_of(small, tmp_path / "a") != history_of(other, tmp_path / "b")
    assert history_of(small, tmp_path / "a2") == history_of(small, tmp_path / "a3")


def test_kill_9_of_the_whole_program(small: TrainConfig, tmp_path: Path) -> None:
    """Killed for real and run again with the same words, it equals the undisturbed run."""
    config = with_settings(small, epochs=40, save_every=5, knn_every=10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    fastsiam("train", *flags(config), "--out", str(whole))
    process = command("train", *flags(config), "--out", str(killed))
    while not (checkpoints.last(killed).exists() and checkpoints.load(killed).step >= 20):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    done = fastsiam("train", *flags(config), "--out", str(killed))
    assert "resuming after step" in done.stderr
    assert history(killed) == history(whole)
    assert same_state(checkpoints.load(killed).model, checkpoints.load(whole).model)
    knn = [[line for line in read_metrics(run) if line["kind"] == "knn"] for run in (whole, killed)]
    assert knn[0] == knn[1] and [line["epoch"] for line in knn[0]] == [0, 10, 20, 30, 40]


def test_resume_refuses_other_settings_and_never_overwrites(
    small: TrainConfig, tmp_path: Path
) -> None:
    train_here(with_settings(small, max_steps=4), "imagenet")
    with pytest.raises(CheckpointError, match=r"lr: 0\.5 -> 0\.1"):
        train_here(with_settings(small, lr=0.1), "imagenet")
    with pytest.raises(CheckpointError, match="already holds a run"):
        train_here(with_settings(small, resume="never"), "imagenet")
    assert checkpoints.load(tmp_path / "run").step == 4
    branch = tmp_path / "branch"
    train_here(with_settings(small, resume=str(tmp_path / "run"), out=str(branch)), "imagenet")
    assert checkpoints.load(branch).step == 12


def test_a_branch_is_not_lost_to_the_run_that_went_on(small: TrainConfig, tmp_path: Path) -> None:
    first = train_here(with_settings(small, max_steps=4), "imagenet")
    branch = with_settings(small, resume=str(first), out=str(tmp_path / "branch"))
    own = checkpoints.last(train_here(with_settings(branch, max_steps=6), "imagenet"))
    train_here(with_settings(small, max_steps=6), "imagenet")
    train_here(with_settings(branch, max_steps=7), "imagenet")  # of two alike, its own
    before = own.read_bytes()
    train_here(small, "imagenet")
    with pytest.raises(
        CheckpointError, match=r"branch already holds a run at step 7, before step 12"
    ):
        train_here(branch, "imagenet")
    assert own.read_bytes() == before
    train_here(with_settings(branch, resume=str(own.parents[1])), "imagenet")
    assert [line[0] for line in history(tmp_path / "branch")] == list(range(5, 13))


def test_what_auto_means_is_written_down(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And kept where a run continues, whatever the processor has there: it is the same run."""
    for amx, precision in ((False, "fp32"), (True, "bf16")):
        config = with_settings(small, precision="auto", out=f"{small.run.out}-{precision}")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        run = train_here(with_settings(config, max_steps=2), "imagenet")
        assert checkpoints.load(run).config.numerics.precision == precision
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: not amx)
        train_here(with_settings(config, max_steps=3), "imagenet")
        assert checkpoints.load(run).step == 3
        assert checkpoints.load(run).config.numerics.precision == precision
        other = "fp32" if amx else "bf16"
        with pytest.raises(CheckpointError, match=f"precision: {precision} -> {other}"):
            train_here(with_settings(config, precision=other), "imagenet")


def test_a_finished_run_stays_finished(small: TrainConfig) -> None:
    run = train_here(small, "imagenet")
    before, state = read_metrics(run), checkpoints.load(run)
    train_here(small, "imagenet")
    assert read_metrics(run) == before
    assert same_state(checkpoints.load(run).model, state.model)
