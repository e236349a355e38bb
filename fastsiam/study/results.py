"""What came of a run: its last figures and its curves, read from its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastsiam.run.log import read_metrics
from fastsiam.study.runs import Run

_DIGITS = 5
"""Of the figures on a curve, which are for pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one run."""

    seed: int
    top1: float
    """The scale's measure after the last epoch, in percent; chance, if the run diverged."""
    untrained: float
    """Top-1 of the network before training, in percent; chance, where that was not measured."""
    z_std: float | None
    """Std of the l2-normalised projections times sqrt(d) at the end; None if the run diverged."""
    rank: float | None
    """Effective rank of the projections at the end; None if the run diverged."""
    loss: float | None
    """Loss at the end; None if the run diverged."""
    batch: int
    """Images of a batch."""
    images: int
    """Training images, which kNN has as its bank; 0 if no kNN evaluation was reached."""
    diverged: bool
    """Whether the loss was not finite, which ended the run."""
    epochs: tuple[float, ...]
    """Epoch of each log line. What the curves of ``loss``, ``z_std`` and ``rank`` have there:"""
    loss_curve: tuple[float, ...]
    z_std_curve: tuple[float, ...]
    rank_curve: tuple[float, ...]
    knn_epochs: tuple[float, ...]
    """Epoch of each kNN evaluation; 0 is before training."""
    knn_curve: tuple[float, ...]
    """kNN top-1 in percent at each of them."""
    centred: bool = True
    """Whether BN centres the projections, so that their std is near 1 unless they collapse."""
    linear: float | None = None
    """Top-1 of linear evaluation beside kNN, in percent; None if there is none."""

    @property
    def gain(self) -> float:
        """Points of top-1 that training brought."""
        return self.top1 - self.untrained


def read_result(run: Run) -> Result | None:
    """Read what came of a run.

    Returns:
        None if it is not done.

    Raises:
        FastSiamError: a file cannot be read.
    """
    if not run.is_done:
        return None
    lines = read_metrics(run.folder)
    knn = [line for line in lines if line["kind"] == "knn"]
    points = _log_points(run, [line for line in lines if line["kind"] == "train"])
    chance, diverged = run.scale.chance, run.is_diverged
    last: Mapping[str, Any] = points[-1] if points and not diverged else {}
    by_knn = run.scale.measure == "kNN top-1"
    untrained = knn[0]["top1"] if by_knn and knn and not knn[0]["epoch"] else chance
    measured = knn[-1]["top1"] if by_knn and knn else run.linear_top1
    return Result(
        seed=run.seed,
        top1=chance if diverged or measured is None else measured,
        untrained=untrained,
        z_std=last.get("z_std"),
        rank=last.get("rank"),
        loss=last.get("loss"),
        batch=run.config.optim.batch,
        images=knn[0]["bank"] if knn else 0,
        diverged=diverged,
        epochs=_column(points, "epoch"),
        loss_curve=_column(points, "loss"),
        z_std_curve=_column(points, "z_std"),
        rank_curve=_column(points, "rank"),
        knn_epochs=_column(knn, "epoch"),
        knn_curve=_column(knn, "top1"),
        centred=run.config.model.method.centred,
        linear=run.linear_top1 if by_knn and not diverged else None,
    )


def _log_points(run: Run, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the lines that a signal brought about: undisturbed, the run has none there."""
    every = run.config.run.log_every
    return [line for line in lines if line["step"] % every == 0 or line is lines[-1]]


def _column(lines: Iterable[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(float(f"{line[name]:.{_DIGITS}g}") for line in lines)
