"""Runs of the tests: a few steps on the CPU, with something done before a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place
from fastsiam.methods import build_method
from fastsiam.pipelines import build_loader
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import read_metrics
from fastsiam.train.loop import train
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader
from tests import rank_jobs

CPU = Place(0, 1, torch.device("cpu"))


class Killed(BaseException):
    """Ends a run as a kill does: nothing is caught, nothing is saved."""


class Wrapped:
    """A loader that runs ``before(step)`` ahead of each batch."""

    def __init__(self, loader: Loader, before: Any) -> None:
        self._loader, self._before = loader, before
        self.source, self.images, self.steps = loader.source, loader.images, loader.steps

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(
            self._loader.epoch(number, skip=skip), start=number * self.steps + skip
        ):
            yield self._before(step, batch) or batch

    def close(self) -> None:
        self._loader.close()


def run_once(
    config: TrainConfig, folder: Path, before: Any = None, start: Checkpoint | None = None
) -> Path:
    loader = build_loader(
        config.data, config.augment, batch=config.optim.batch, seed=config.numerics.seed
    )
    if config.data.pipeline == "synthetic":
        loader.steps, loader.images = 3, 24  # type: ignore[misc]
    wrapped = Wrapped(loader, before or (lambda step, batch: None))
    torch.manual_seed(config.numerics.seed)
    try:
        folder.mkdir(exist_ok=True)
        method = build_method(config.model, images=wrapped.images)
        step = TrainingStep(config, method, CPU, steps_per_epoch=wrapped.steps)
        step.prepare()
        return train(step, wrapped, folder=RunFolder(folder), start=start)
    finally:
        loader.close()


def run_until(config: TrainConfig, folder: Path, kill_at: int) -> None:
    """Run, and be killed before a step."""

    def kill(step: int, batch: Batch) -> None:
        if step == kill_at:
            raise Killed

    with pytest.raises(Killed):
        run_once(config, folder, before=kill)


def history(run: Path) -> list[tuple[Any, ...]]:
    fields = ("step", "epoch", "loss", "z_std", "rank", "lr", "since", "seen")
    return [tuple(line[f] for f in fields) for line in read_metrics(run) if line["kind"] == "train"]


def history_of(config: TrainConfig, folder: Path) -> list[tuple[Any, ...]]:
    run_once(config, folder)
    return history(folder)


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def results(**settings: Any) -> dict[str, Any]:
    """Return losses, gradients, weights and BN statistics of three steps."""
    return rank_jobs.steps(0, 1, **settings)


def assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 0.0) -> None:
    for name in ("loss", "gradient", "state"):
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=tolerance)
