"""Killed or stopped runs resume exactly. A run that cannot be resumed is not changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, DataError, Interrupted, TrainingError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.step import TrainingStep
from fastsiam.train.trainer import Trainer
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.conftest import small_config, write_data
from tests.conversions import stub_raising
from tests.faults.sitecustomize import install
from tests.pipelines.cases import PIPELINES, make_readable
from tests.processes import Forked, fastsiam, run_program
from tests.tiers import slow
from tests.train.runs import (
    assert_same_runs,
    history,
    make_worker_kill_hook,
    resume_after,
    same_state,
    train_run,
    train_until_kill,
    verify_run,
)

RunOfPipeline = Callable[[str], Path]


def make_run_config(config: TrainConfig, pipeline: str = "memory") -> TrainConfig:
    """Return a run of 12 steps that saves every 2 steps: 4 epochs, or one if synthetic."""
    data = make_readable(pipeline, Path(config.data.data))
    config = with_settings(config, pipeline=pipeline, data=data, max_steps=12)
    return with_settings(config, shuffle="window:7", save_every=2, knn_every=0)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> RunOfPipeline:
    """Train an uninterrupted run of a pipeline once and return its folder."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data")
    return cache(
        lambda pipeline: train_run(make_run_config(small_config(data, folder / pipeline), pipeline))
    )


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_killed_run_resumes_bit_for_bit(
    pipeline: str, small: TrainConfig, full_run: RunOfPipeline
) -> None:
    """The run is killed in the middle of an epoch. The next test covers all other steps."""
    config = make_run_config(small, pipeline)
    assert checkpoints.load(full_run(pipeline)).step == len(history(full_run(pipeline))) == 12
    run = train_until_kill(config, 5)
    assert checkpoints.load(run).step == 4
    assert_same_runs(train_run(config), full_run(pipeline))
    assert "12 log lines agree" in verify_run(run)


def test_run_killed_at_any_step_resumes(
    small: TrainConfig, tmp_path: Path, full_run: RunOfPipeline
) -> None:
    """One run is copied before every step. Each copy is what a kill at that step would leave."""
    config = make_run_config(small)

    def copy(step: int, batch: Batch) -> None:
        shutil.copytree(config.run.out, tmp_path / f"killed{step}")

    train_run(config, copy)
    for kill_at in range(1, 12):
        run = tmp_path / f"killed{kill_at}"
        last = checkpoints.last(run)
        assert (checkpoints.load(run).step if last.exists() else 0) == kill_at // 2 * 2
        assert_same_runs(train_run(config, out=run), full_run("memory"))


def run_out_of_memory(config: TrainConfig, error: Exception, kind: str) -> None:
    """The error names the previous checkpoint: a half-finished step is not saved."""
    take: Callable[..., Any] = TrainingStep.__call__
    steps = count(1)

    def step(self: TrainingStep, batch: Batch, *, at: int) -> Any:
        result = take(self, batch, at=at)
        if next(steps) == 6:
            raise error
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as caught:
        patch.setattr(TrainingStep, "__call__", step)
        train_run(config)
    message, saved = str(caught.value), checkpoints.last(Path(config.run.out))
    assert message.startswith(f"out of {kind} at step 6 with --batch 8; to resume this run, pass ")
    assert message.endswith(f"; the last good checkpoint is {saved} (step 4)")


def run_out_of_memory_at_startup(config: TrainConfig) -> None:
    """Compilation runs before the first step and needs as much memory as a step."""
    for step in (1, 5):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as caught:
            patch.setattr(TrainingStep, "prepare", Mock(side_effect=GPU_ERROR))
            train_run(config)
        message = str(caught.value)
        assert message.startswith(f"out of GPU memory at step {step} with --batch 8; to resume")
        assert message.endswith("; no step was taken")
        train_run(config, max_steps=4)


def corrupt_checkpoint(config: TrainConfig) -> None:
    """The next start logs it, resumes from the previous checkpoint and keeps the corrupt file."""
    last = checkpoints.last(train_run(config, max_steps=7))
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 16
    last.write_bytes(content)


def fail_to_read_checkpoint(config: TrainConfig) -> None:
    """The file server does not respond, or memory runs out: the checkpoint is not corrupt."""
    train_run(config, max_steps=4)
    no_memory = RuntimeError("[enforce fail at alloc_cpu.cpp:128] can't allocate memory")
    for load, why in (
        (stub_raising(errno.ESTALE), "Stale file handle"),
        (Mock(side_effect=no_memory), "out of memory"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "load", load)
            with pytest.raises(CheckpointError, match=rf"cannot read .*last\.pt: {why}"):
                train_run(config)


def kill_during_save(config: TrainConfig, at: int, has_links: bool) -> None:
    """Kill the run when half of a checkpoint is written (``at=0``), or before a rename."""
    result = Forked(train_and_die_in_save, config, at, has_links).wait(120)
    assert result.returncode == -signal.SIGKILL
    assert len(history(Path(config.run.out))) < 12


def train_and_die_in_save(config: TrainConfig, at: int, has_links: bool) -> None:
    if not has_links:
        os.link = stub_raising(errno.EPERM)
    write, replace_file, saves = torch.save, os.replace, iter(range(100))

    def save(state: object, path: Path) -> None:
        write(state, path)
        if at == 0 and next(saves) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(source: Path, target: Path) -> None:
        if at and str(target).endswith(("previous.pt", "last.pt")) and next(saves) == 2 + at:
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    torch.save, os.replace = save, rename  # type: ignore[assignment]
    train_run(config)


GPU_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ENDINGS: dict[str, Callable[[TrainConfig], None]] = {
    "memory": partial(run_out_of_memory, error=MemoryError(), kind="memory"),
    "GPU memory": partial(run_out_of_memory, error=GPU_ERROR, kind="GPU memory"),
    "GPU memory at startup": run_out_of_memory_at_startup,
    "damaged checkpoint": corrupt_checkpoint,
    "unreadable checkpoint": fail_to_read_checkpoint,
    "killed while writing checkpoint": partial(kill_during_save, at=0, has_links=True),
    "killed before last.pt is replaced, no hard links": partial(
        kill_during_save, at=2, has_links=False
    ),
    "killed before previous.pt is replaced": partial(kill_during_save, at=1, has_links=True),
    "killed before previous.pt is replaced, no hard links": partial(
        kill_during_save, at=1, has_links=False
    ),
    "killed before last.pt is replaced": partial(kill_during_save, at=2, has_links=True),
}
SLOW = [*ENDINGS][-4:]


@pytest.mark.parametrize("ending", [slow(name) if name in SLOW else name for name in ENDINGS])
def test_run_resumes_after_failure(
    ending: str, small: TrainConfig, full_run: RunOfPipeline, capfd: pytest.CaptureFixture[str]
) -> None:
    ENDINGS[ending](make_run_config(small))
    capfd.readouterr()
    run = train_run(make_run_config(small))
    assert_same_runs(run, full_run("memory"))
    left = {path.name for path in (run / "checkpoints").iterdir()} - {"last.pt", "previous.pt"}
    assert left == ({"last.pt.damaged"} if ending == "damaged checkpoint" else set())
    message = "last.pt is corrupt: resuming from the previous checkpoint, at step 6"
    assert (message in capfd.readouterr().err) == (ending == "damaged checkpoint")


def test_run_stopped_by_killed_worker_resumes(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=0)
    error = resume_after(config, tmp_path, make_worker_kill_hook())
    assert str(error).startswith("a worker process died (")
    assert str(error).endswith("start the same command again to resume")


def test_run_stopped_by_changed_file_size_resumes(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    file = make_readable("ffcv", images) / "train.beton"
    size = file.stat().st_size
    config = with_settings(small, data=file.parent, pipeline="torchvision", knn_every=0)
    error = resume_after(
        config,
        tmp_path,
        lambda step, _: os.truncate(file, size + 1) if step == 4 else None,
        lambda: os.truncate(file, size),
    )
    assert f"{file} changed while it was read: it had {size:,} bytes" in str(error)


def test_log_lines_are_written_once(
    small: TrainConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A signal adds no line. A line that was delayed until after a kill is not lost.

    Runs are killed between a log point and its log line, also after the next checkpoint.
    """
    config = with_settings(make_run_config(small), log_every=3)
    reference = history(train_run(config, out=tmp_path / "whole"))

    def stop(step: int, _: Batch) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped after step 4, saved"):
        train_run(config, stop)
    assert history(train_run(config)) == reference
    request.getfixturevalue("slow_eigenvalues")
    assert history(train_run(config, out=tmp_path / "late")) == reference
    for kill_at in (3, 10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "close", lambda trainer: None)  # writes nothing
            run = train_until_kill(config, kill_at, out=tmp_path / f"killed{kill_at}")
        step = checkpoints.load(run).step
        assert step == kill_at // 2 * 2
        saved = [line for line in reference if line[0] <= step]
        assert history(run)[: len(saved)] == saved
        assert history(train_run(config, out=run)) == reference


def test_knn_monitor_is_not_dropped_on_resume(small: TrainConfig, images: Path) -> None:
    config = with_settings(small, save_every=1, knn_every=1, epochs=2)
    run = train_until_kill(config, 4)
    (images / "val").rename(images / "elsewhere")
    with pytest.raises(DataError, match=r"the kNN monitor cannot continue: .* pass --knn-every 0"):
        train_run(config)
    assert checkpoints.load(train_run(config, knn_every=0)).step == 6
    assert [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"] == [0, 1]


def fail_at_step(step: int, arguments: Sequence[str]) -> None:
    """Run a command that fails at a step of its run (see ``tests/faults``)."""
    install(str(step))
    run_program(*arguments)


def test_sigkilled_command_resumes_bit_for_bit(small: TrainConfig, tmp_path: Path) -> None:
    """After SIGKILL, the same command continues and gives the result of an uninterrupted run."""
    config = with_settings(small, epochs=20, save_every=5, knn_every=10)
    reference, killed = tmp_path / "whole", tmp_path / "killed"
    fastsiam("train", *flags(config), "--out", str(reference))
    options = ["train", *flags(config), "--out", str(killed)]
    process = Forked(fail_at_step, 23, options, environment={"FAULT": "SIGKILL"})
    assert process.wait().returncode == -signal.SIGKILL
    assert 0 < checkpoints.load(killed).step < 23  # evaluations take some of the 23 votes
    result = fastsiam("train", *flags(config), "--out", str(killed))
    assert "resuming after step" in result.stderr
    assert_same_runs(killed, reference)
    knn = [
        [line for line in read_metrics(run) if line["kind"] == "knn"] for run in (reference, killed)
    ]
    assert knn[0] == knn[1] and [line["epoch"] for line in knn[0]] == [0, 10, 20]


def test_finished_run_only_repeats_missing_evaluation(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A finished run only repeats the last evaluation, if it was killed before logging that.

    It evaluates before it reports that nothing is left to do. Its settings still name the machine
    that trained it.
    """
    run = train_run(small)
    settings = json.loads((run / "config.json").read_text())
    settings["environment"]["cpu"] = "another machine"
    (run / "config.json").write_text(json.dumps(settings))
    before, state = read_metrics(run), checkpoints.load(run)
    *other_lines, last = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(other_lines))
    assert '"knn"' in last
    capfd.readouterr()
    train_run(small)
    assert "epoch 4: " in capfd.readouterr().err.partition("nothing left to do: ")[0]
    assert read_metrics(run) == before
    monkeypatch.setattr(Trainer, "_evaluate", Mock(side_effect=AssertionError))
    train_run(small)
    assert read_metrics(run) == before
    assert same_state(checkpoints.load(run).model, state.model)
    assert json.loads((run / "config.json").read_text()) == settings
