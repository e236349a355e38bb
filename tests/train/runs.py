"""Helpers that train for a few steps on the CPU, with a hook before each step."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.distributed import Place
from fastsiam.errors import FastSiamError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import command
from fastsiam.train.verify import verify
from fastsiam.views.batch import Batch
from tests.configs import with_settings

CPU = Place(0, 1, torch.device("cpu"))
OLD_RUN = Path(__file__).parents[1] / "data" / "run-0.2"
"""A run of version 0.2, after 6 of 12 steps."""

StepHook = Callable[[int, Batch], Batch | None]
"""Hook that is called with the step and its batch before each step. It may return another batch."""


class Killed(BaseException):
    """Ends a run like SIGKILL would: nothing catches it and nothing is saved."""


def hook_steps(loader: Any, before: StepHook) -> Any:
    """Make a loader run ``before(step, batch)`` ahead of each step; return the loader."""
    epoch = loader.epoch

    def epoch_with_hook(number: int, *, skip: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(epoch(number, skip=skip), number * loader.steps + skip):
            yield before(step, batch) or batch

    loader.epoch = epoch_with_hook
    return loader


def train_run(config: TrainConfig, before: StepHook | None = None, **settings: Any) -> Path:
    """Train in this process with some settings changed; return the run's folder."""
    build: Any = vars(command)["build_loader"]
    with pytest.MonkeyPatch.context() as patch:
        if before is not None:
            patch.setattr(
                command, "build_loader", lambda *a, **k: hook_steps(build(*a, **k), before)
            )
        return command.train_here(with_settings(config, **settings), "imagenet")


def train_until_kill(config: TrainConfig, at: int, **settings: Any) -> Path:
    """Train until just before step ``at``, then kill the run; return its folder."""

    def kill(step: int, batch: Batch) -> None:
        if step == at:
            raise Killed

    with pytest.raises(Killed):
        train_run(config, kill, **settings)
    return Path(with_settings(config, **settings).run.out)


def verify_run(run: Path, **settings: Any) -> str:
    """Verify a run; return its messages, joined by newlines."""
    return "\n".join(verify(run, VerifyConfig(**settings)))


def history(run: Path) -> list[tuple[Any, ...]]:
    fields = ("step", "epoch", "loss", "z_std", "rank", "lr", "since", "seen")
    return [tuple(line[f] for f in fields) for line in read_metrics(run) if line["kind"] == "train"]


def same_state(one: Any, other: Any) -> bool:
    """Compare nested containers of tensors and plain values bit for bit."""
    if isinstance(one, torch.Tensor):
        as_bytes = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_kind and torch.equal(*as_bytes)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def assert_same_runs(run: Path, reference: Path) -> None:
    """Check that two runs have bitwise equal log lines, weights and optimizer state."""
    one, other = checkpoints.load(run), checkpoints.load(reference)
    assert history(run) == history(reference)
    assert one.step == other.step and same_state(one.model, other.model)
    assert same_state(one.optimizer, other.optimizer)


def resume_after(
    config: TrainConfig, folder: Path, before: StepHook, restore: Callable[[], Any] = bool
) -> FastSiamError:
    """End a run with an error that ``before`` raises; check that it saves and resumes exactly.

    Returns:
        The error that ended the run.
    """
    reference = train_run(config, out=folder / "whole")
    config = with_settings(config, out=folder / "ended")
    with pytest.raises(FastSiamError) as caught:
        train_run(config, before)
    last = checkpoints.last(folder / "ended")
    assert f"saved {last} at step" in caught.value.__notes__[0]
    assert 0 < checkpoints.load(last).step < checkpoints.load(reference).step
    restore()
    assert_same_runs(train_run(config), reference)
    return caught.value


def make_worker_kill_hook() -> StepHook:
    """Return a hook that kills one loader worker before step 4 and waits until it has exited.

    Workers that already exist are ignored: a thread may still be shutting down those of an earlier
    test.
    """
    earlier_workers = set(multiprocessing.active_children())

    def kill(step: int, _: Batch) -> None:
        if step == 4:
            worker = (set(multiprocessing.active_children()) - earlier_workers).pop()
            worker.kill()
            worker.join(60)
            assert not worker.is_alive()

    return kill
