"""Monitoring of a run: its log points, and evaluations of its features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fastsiam.config import MonitorConfig
from fastsiam.console import Console
from fastsiam.distributed import gather, mean_across_ranks
from fastsiam.errors import NOT_FINITE, TrainingError
from fastsiam.model.numerics import FiniteCheck
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import MetricsLog
from fastsiam.train.clock import Clock
from fastsiam.train.collapse import gram, rank_of_gram, z_std
from fastsiam.train.data_digest import DataDigest
from fastsiam.train.gauges import Gauges
from fastsiam.train.guard import CollapseGuard
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Loader

T = TypeVar("T")


class Quality(Protocol):
    """Result of an evaluation of the features."""

    def record(self) -> dict[str, Any]:
        """Return plain JSON values."""

    def __str__(self) -> str:
        """Return the result as one line of text."""


class Watched(Protocol):
    """An iterator over items that ends early if the ranks have to stop (``StopSignals.over``)."""

    def __call__(self, items: Iterable[T], /) -> Iterator[T]:
        """Yield the items; raise an error when the ranks stop."""


class Evaluate(Protocol):
    """An evaluation of a backbone; every rank calls it."""

    def __call__(self, backbone: nn.Module, /, *, watched: Watched) -> Quality:
        """Evaluate the backbone; batches pass through ``watched``, so that signals can end it."""


def metrics_log(
    folder: RunFolder, step: TrainingStep, *, done: int, end: int, evaluates_again: bool
) -> MetricsLog | None:
    """Open the metrics of a run on rank 0; None on other ranks.

    Args:
        folder: the run's folder.
        step: the training step.
        done: number of steps that the run resumes after.
        end: the last step of this run.
        evaluates_again: whether the evaluation after step ``done`` will be repeated.
    """
    if not step.place.is_leader:
        return None
    return MetricsLog(
        folder,
        step=done,
        steps_per_epoch=step.steps_per_epoch,
        end=end,
        evaluates_again=evaluates_again,
        trackers=step.config.run.trackers,
        settings=step.config.to_flags(),
    )


class LogPoints:
    """Logs loss, collapse measures and speed every ``log_every`` steps.

    On a GPU a host thread computes the eigenvalues for the effective rank while training continues,
    so a line is written some steps later: at the first step after the thread is done, or by
    ``settle``. On a CPU the line is written at once.

    Args:
        step: the training step; every rank calls the same methods.
        log: the metrics, on rank 0; None on the others.
        console: shows the progress on rank 0.
        clock: the run's.
        digest: digest of the images and augmentations.
        end: the last step of this run.
        loader: whose number of threads is logged, if it finds it by itself.
        initial: z_std of the untrained network, if the run measured it before.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        log: MetricsLog | None,
        console: Console,
        clock: Clock,
        digest: DataDigest,
        end: int,
        loader: Loader | None = None,
        initial: float | None = None,
    ) -> None:
        config, place = step.config, step.place
        self._step, self._log, self._console, self._clock, self._end = (
            step, log, console, clock, end,
        )  # fmt: skip
        self._digest, self._batch = digest, config.optim.batch
        self._finite = FiniteCheck(place.device)
        self._guard = CollapseGuard(
            config.monitor.on_collapse,
            batch=self._batch // config.optim.accumulate,
            centred=config.model.method.centred,
        )
        self._loader = loader
        if initial is not None:
            self._guard.begin(initial)
        stops = config.monitor.on_collapse == "stop"
        self._judges = place.is_leader or stops
        self._thread = (
            ThreadPoolExecutor(1, "fastsiam-rank") if host_is_idle(place.device) else None
        )
        # Ranks must stop at the same step, so the thread's timing must not decide.
        self._settles_early = self._thread is None or place.world == 1 or not stops
        self._gauges = Gauges(log, console=console) if log else None
        self._line: tuple[dict[str, Any], Future[Tensor]] | None = None
        """The pending log line, and its effective rank."""

    def note(self, done: int, loss: Tensor) -> None:
        """Note a step's loss; waits neither for the device nor for the thread.

        Raises:
            TrainingError: the representation collapsed at the last log point, and ``on_collapse``
                is "stop".
        """
        self._finite.note(done, loss)
        self._settle_early()

    def note_untrained(self, embedding: Tensor) -> None:
        """Measure the embeddings of the first step, before any update; every rank must call it.

        Collapse is judged relative to them. A resumed run reads their z_std from the log.

        Args:
            embedding: (n, dim) of this rank.
        """
        spread = z_std(gather(embedding)).item()
        if not math.isfinite(spread):  # the first check of the losses ends the run
            return
        self._guard.begin(spread)
        if self._log:
            self._log.write("initial", {"step": 0, "epoch": 0.0, "z_std": spread})

    def check_finite(self, done: int, *, saved: object) -> None:
        """Check that all losses and weights are finite; waits for the device.

        Args:
            done: steps done.
            saved: names the last good checkpoint, as a string.

        Raises:
            TrainingError: names the first bad step, and the last good checkpoint.
        """
        self._finite.note_weights(done, self._step.method)
        bad = self._finite.verdict()
        if bad is not None:
            raise TrainingError(
                f"{NOT_FINITE} at step {bad:,}; {saved}; try a lower --lr or --precision fp32"
            )

    def log(self, done: int, loss: Tensor, embedding: Tensor) -> None:
        """Compute the metrics of step ``done``, to be written and shown; waits for the device.

        Raises:
            TrainingError: as ``settle``.
        """
        self.settle()
        self._digest.share()
        z = gather(embedding)
        # The host waits once: when the two numbers have arrived, so has the earlier copy.
        products = gram(z).to("cpu", non_blocking=True)
        numbers = torch.stack([mean_across_ranks(loss).double(), z_std(z).double()])
        mean, spread = numbers.tolist()
        self._clock.pause()
        values = {
            "step": done,
            "epoch": done / self._step.steps_per_epoch,
            "loss": mean,
            "z_std": spread,
            "rank": math.nan,  # set when the line is written
            "lr": self._step.lr,
            **self._clock.read(self._batch),
            **self._digest.line(done),
        }
        if (workers := getattr(self._loader, "tuned_workers", None)) is not None:
            values["workers"] = workers
        if self._judges:
            self._line = values, self._beside(rank_of_gram, products)
            self._settle_early()

    def settle(self) -> None:
        """Write and show the pending log line, if any; waits for its effective rank.

        Must be called before every checkpoint, so that the log of a resumed run has no gap.

        Raises:
            TrainingError: the representation collapsed, and ``on_collapse`` is "stop".
        """
        if (values := self._write()) is None:
            return
        if warning := self._guard.check(values["step"], values["z_std"], values["rank"]):
            self._console.warn(warning)

    def close(self) -> None:
        """Write the pending line without checking it; close the thread and the log."""
        try:
            self._write()
        finally:
            if self._thread:
                self._thread.shutdown()
            if self._log:
                self._log.close()

    def _settle_early(self) -> None:
        if self._settles_early and self._line and self._line[1].done():
            self.settle()

    def _write(self) -> dict[str, Any] | None:
        if self._line is None:
            return None
        (values, rank), self._line = self._line, None
        values["rank"] = rank.result().item()
        if self._log:
            self._log.write("train", values)
        self._console.show(values, remaining=self._end - values["step"], batch=self._batch)
        if self._gauges:
            self._gauges.check(values)
        return values

    def _beside(self, function: Callable[[Tensor], Tensor], argument: Tensor) -> Future[Tensor]:
        """Compute in the thread if there is one, else at once."""
        if self._thread:
            return self._thread.submit(function, argument)
        done: Future[Tensor] = Future()
        done.set_result(function(argument))
        return done


def host_is_idle(device: torch.device) -> bool:
    """Return whether the host has time for other work while the device trains."""
    return device.type == "cuda"


class Evaluations:
    """Evaluates the features every ``knn_every`` epochs and after the last one.

    Args:
        evaluate: the evaluation, or None.
        config: how often to evaluate.
        step: the training step.
        console: shows the results on rank 0.
    """

    def __init__(
        self,
        evaluate: Evaluate | None,
        *,
        config: MonitorConfig,
        step: TrainingStep,
        console: Console,
    ) -> None:
        self._evaluate = evaluate if config.knn_every else None
        self._config, self._step, self._console = config, step, console

    def due(self, done: int) -> bool:
        """Return whether the settings ask for an evaluation after step ``done``."""
        epoch, within = divmod(done, self._step.steps_per_epoch)
        if self._evaluate is None or within:
            return False
        if not epoch:
            return self._config.knn_first
        return epoch % self._config.knn_every == 0 or done == self._step.total

    def run(self, done: int, log: MetricsLog | None, *, watched: Watched) -> None:
        """Evaluate, log and print the result; every rank must call it.

        Args:
            done: steps done.
            log: the metrics, on rank 0; None on the others.
            watched: wraps the iterator over batches, so that signals can end the evaluation.
        """
        assert self._evaluate is not None
        epoch = done / self._step.steps_per_epoch
        result = self._evaluate(self._step.method.backbone, watched=watched)
        if log:
            log.write("knn", {"epoch": epoch, **result.record()})
        self._console.say(f"epoch {epoch:g}: {result}")
