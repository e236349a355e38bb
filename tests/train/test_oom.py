"""Memory, disk and clock that let a run down: one line, or nothing at all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import TrainingError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.processes import Forked
from tests.train.runs import history, history_of, run_once

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_a_step_without_memory(
    error: Exception, small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is the checkpoint before, not a step that is half done."""
    config = with_settings(small, save_every=2, knn_every=0)
    expected = history_of(config, tmp_path / "whole")
    real: Callable[..., Any] = TrainingStep.__call__
    steps = count(1)

    def step(self: TrainingStep, batch: Batch, *, at: int) -> Any:
        done = real(self, batch, at=at)
        if next(steps) == 6:
            raise error
        return done

    with monkeypatch.context() as patched, pytest.raises(TrainingError) as caught:
        patched.setattr(TrainingStep, "__call__", step)
        run_once(config, tmp_path / "run")
    said, saved = str(caught.value), checkpoints.last(tmp_path / "run")
    kind = "GPU memory" if isinstance(error, torch.OutOfMemoryError) else "memory"
    assert said.startswith(f"out of {kind} at step 6 with --batch 8; to resume this run, pass ")
    assert said.endswith(f"; the last good checkpoint is {saved} (step 4)")
    run_once(config, tmp_path / "run", start=checkpoints.load(saved))
    assert history(tmp_path / "run") == expected


def test_a_loader_without_memory(small: TrainConfig, tmp_path: Path) -> None:
    """In the run's own process, as that of its threads."""

    def fail(step: int, batch: Batch) -> None:
        raise MemoryError

    with pytest.raises(TrainingError, match=r"at step 1 with .*; nothing was saved yet$"):
        run_once(small, tmp_path / "run", before=fail)


def test_a_clock_that_jumps_changes_no_figure(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back and forth by days: durations are not the wall clock's."""
    expected = history_of(small, tmp_path / "quiet")
    jumps = count()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e6)
    began = time.perf_counter()
    run_once(small, tmp_path / "run")
    took = time.perf_counter() - began
    assert history(tmp_path / "run") == expected
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] <= took
    batch, before = small.optim.batch, [0.0, *seconds]
    for line, since in zip(lines, before, strict=False):
        assert line["images_per_second"] == pytest.approx(batch / (line["seconds"] - since))
        assert 0 <= line["data_wait"] <= 1


def train_without_stderr(arguments: list[str], kind: str) -> None:
    """Be a command whose messages nobody can take, from its start to its exit code."""
    if kind == "closed":
        os.close(2)
        sys.stderr = None
    elif kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
    sys.argv = ["fastsiam", *arguments]
    from fastsiam.cli import main

    main()


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_a_run_whose_messages_nobody_can_take(
    kind: str, small: TrainConfig, tmp_path: Path
) -> None:
    """stderr on a full disk, a reader of it that left, or none at all (``2>&-``)."""
    expected = history_of(small, tmp_path / "whole")
    done = Forked(train_without_stderr, ["train", *flags(small)], kind).wait(120)
    assert done.returncode == 0
    assert history(tmp_path / "run") == expected
