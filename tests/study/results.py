"""Synthetic results and records of studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastsiam.config.study import StudyConfig
from fastsiam.environment import environment
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.record import Result, StudyRecord, collect
from fastsiam.study.scales import scale


def result(
    seed: int,
    top1: float = 60.0,
    *,
    untrained: float = 20.0,
    z_std: float | None = 0.95,
    rank: float | None = 40.0,
    losses: Sequence[float] = (0.0, -0.5, -0.7, -0.8, -0.9),
    z_std_curve: Sequence[float] = (0.9, 0.9, 0.9, 0.9, 0.9),
    diverged: bool = False,
    centred: bool = True,
) -> Result:
    """Build the result of a run; defaults are those of a healthy run."""
    return Result(
        seed=seed,
        top1=10.0 if diverged else top1,
        untrained=untrained,
        z_std=None if diverged else z_std,
        rank=None if diverged else rank,
        loss=None if diverged else losses[-1],
        batch=128,
        images=4000,
        diverged=diverged,
        centred=centred,
        epochs=tuple(float(x) for x in range(len(losses))),
        loss_curve=tuple(losses),
        z_std_curve=tuple(z_std_curve),
        rank_curve=(30.0,) * len(losses),
        knn_epochs=(0.0, 4.0),
        knn_curve=(untrained, top1),
    )


def row(*top1: float) -> tuple[Result, ...]:
    """Build results of seeds 0, 1, ... with these top-1 accuracies in percent."""
    return tuple(result(seed, value) for seed, value in enumerate(top1))


def record(name: str = "predictor", rows: Sequence[Sequence[Result]] = ()) -> StudyRecord:
    """Build a study's record at demo scale; rows that are not given get three default results."""
    empty = collect(STUDIES[name], scale("demo"), [], StudyConfig())
    of_rows = [*rows, *[row(38, 32, 43)] * (len(empty.rows) - len(rows))]
    return replace(
        empty,
        rows=tuple(
            replace(one, results=tuple(results))
            for one, results in zip(empty.rows, of_rows, strict=True)
        ),
        command=f"fastsiam study run {name} --scale demo",
        date="2026-01-31",
        environments=(environment(),),
    )
