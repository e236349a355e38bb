"""What is looked at while a run goes on: its log points, and the quality of its features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from fastsiam.console import Console
from fastsiam.distributed import gather, mean_across_ranks
from fastsiam.errors import TrainingError
from fastsiam.training.clock import Clock
from fastsiam.training.collapse import CollapseGuard, effective_rank, z_std
from fastsiam.training.log import MetricsLog
from fastsiam.training.numerics import FiniteCheck, all_finite
from fastsiam.training.step import TrainingStep


class Quality(Protocol):
    """What an evaluation of the features found."""

    def record(self) -> dict[str, Any]:
        """Return plain JSON values."""

    def __str__(self) -> str:
        """One line for people."""


Evaluate = Callable[[nn.Module], Quality]
"""Evaluates a backbone; every rank calls it."""


def metrics_log(
    run: Path, step: TrainingStep, *, done: int, evaluates_again: bool
) -> MetricsLog | None:
    """Open the metrics of a run that goes on after so many steps; None on all ranks but the first.

    Args:
        run: the run's folder.
        step: the training step.
        done: steps that the run goes on from.
        evaluates_again: whether the evaluation after them is about to be repeated.
    """
    if not step.place.leads:
        return None
    return MetricsLog(
        run,
        step=done,
        steps_per_epoch=step.steps_per_epoch,
        evaluates_again=evaluates_again,
    )


class LogPoints:
    """Looks at the run every so many steps: loss, collapse, speed.

    Args:
        step: the training step; every rank looks together.
        log: where rank 0 writes; None on the others.
        console: where rank 0 shows the progress.
        clock: the run's.
        end: the last step of this run.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        log: MetricsLog | None,
        console: Console,
        clock: Clock,
        end: int,
    ) -> None:
        config = step.config
        self._step, self._log, self._console, self._clock, self._end = (
            step, log, console, clock, end,
        )  # fmt: skip
        self._batch = config.optim.batch
        self._finite = FiniteCheck(step.place.device)
        self._guard = CollapseGuard(config.monitor.on_collapse, batch=self._batch)

    def note(self, done: int, loss: Tensor) -> None:
        """Note a step's loss; does not wait for the device."""
        self._finite.note(done, loss)

    def check_finite(self, done: int, *, saved: object) -> None:
        """Refuse to go on after a loss or a weight that is not finite; waits for the device.

        Raises:
            TrainingError: names the first bad step, and says what is ``saved``.
        """
        bad = self._finite.verdict()
        if bad is None and not all_finite(self._step.method):
            bad = done
        if bad is not None:
            raise TrainingError(
                f"the loss is not finite at step {bad:,}; {saved}; "
                "try a lower --lr or --precision fp32"
            )

    def log(self, done: int, loss: Tensor, embedding: Tensor) -> None:
        """Write and show the metrics after so many steps; waits for the device.

        Raises:
            TrainingError: the representation collapsed, and the run shall stop then.
        """
        z = gather(embedding)
        values = {
            "step": done,
            "epoch": done / self._step.steps_per_epoch,
            "loss": mean_across_ranks(loss).item(),
            "z_std": z_std(z).item(),
            "rank": effective_rank(z).item(),
            "lr": self._step.lr,
        }
        self._clock.pause()
        values |= self._clock.read(self._batch)
        if self._log:
            self._log.write("train", values)
        self._console.show(values, remaining=self._end - done, batch=self._batch)
        if warning := self._guard.check(done, values["z_std"], values["rank"]):
            self._console.warn(warning)


class Evaluations:
    """Evaluates the features every so many epochs, before the first and after the last too.

    Args:
        evaluate: the evaluation; None if there is none.
        every: epochs between two; 0 turns them off.
        step: the training step.
        console: where rank 0 says what was found.
    """

    def __init__(
        self, evaluate: Evaluate | None, *, every: int, step: TrainingStep, console: Console
    ) -> None:
        self._evaluate = evaluate if every else None
        self._every, self._step, self._console = every, step, console

    def due(self, done: int) -> bool:
        """Tell whether it is time for one, after so many steps."""
        epoch, within = divmod(done, self._step.steps_per_epoch)
        at_end = done == self._step.total
        return self._evaluate is not None and not within and (epoch % self._every == 0 or at_end)

    def run(self, done: int, log: MetricsLog | None) -> None:
        """Evaluate, and write and say what was found; every rank takes part."""
        assert self._evaluate is not None
        epoch = done / self._step.steps_per_epoch
        result = self._evaluate(self._step.method.backbone)
        if log:
            log.write("knn", {"epoch": epoch, **result.record()})
        self._console.say(f"epoch {epoch:g}: {result}")
