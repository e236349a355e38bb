"""What is looked at while a run trains: its log points, and the quality of its features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fastsiam.config import MonitorConfig
from fastsiam.config.flags import to_flags
from fastsiam.console import Console
from fastsiam.distributed import gather, mean_across_ranks
from fastsiam.errors import NOT_FINITE, TrainingError
from fastsiam.model.numerics import FiniteCheck
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import MetricsLog
from fastsiam.train.clock import Clock
from fastsiam.train.collapse import flat_share, gram, rank_of_gram, z_std
from fastsiam.train.data_digest import DataDigest
from fastsiam.train.gauges import Gauges
from fastsiam.train.guard import CollapseGuard
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader

T = TypeVar("T")


class Quality(Protocol):
    """What an evaluation of the features found."""

    def record(self) -> dict[str, Any]:
        """Return plain JSON values."""

    def __str__(self) -> str:
        """One line for people."""


class Watched(Protocol):
    """Passes items on as long as all ranks can continue (``StopSignals.over``)."""

    def __call__(self, items: Iterable[T], /) -> Iterator[T]:
        """Yield the items; raise where the ranks leave."""


class Evaluate(Protocol):
    """Evaluates a backbone; every rank calls it."""

    def __call__(self, backbone: nn.Module, /, *, watched: Watched) -> Quality:
        """Return what was found, in batches taken through ``watched``, which a signal ends."""


def metrics_log(
    folder: RunFolder, step: TrainingStep, *, done: int, end: int, evaluates_again: bool
) -> MetricsLog | None:
    """Open the metrics of a run after so many steps; None on all ranks but the first.

    Args:
        folder: the run's folder.
        step: the training step.
        done: steps that the run continues from.
        end: the last step of this run.
        evaluates_again: whether the evaluation after them is about to be repeated.
    """
    if not step.place.leads:
        return None
    return MetricsLog(
        folder,
        step=done,
        steps_per_epoch=step.steps_per_epoch,
        end=end,
        evaluates_again=evaluates_again,
        trackers=step.config.run.trackers,
        settings=to_flags(step.config),
    )


class LogPoints:
    """Looks at the run every so many steps: loss, collapse, speed.

    On a GPU the host finds the eigenvalues of the effective rank in a thread while training goes
    on, so a line is written some steps after its own: at the first step that finds it done, or with
    ``settle``. On a CPU, which has nothing else to do, it is written at once.

    Args:
        step: the training step; every rank looks together.
        log: where rank 0 writes; None on the others.
        console: where rank 0 shows the progress.
        clock: the run's.
        digest: of what was trained on.
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
            config.monitor.on_collapse, batch=self._batch, centred=config.model.method.centred
        )
        self._initial, self._loader = initial, loader
        if initial is not None:
            self._guard.begin(initial)
        stops = config.monitor.on_collapse == "stop"
        self._judges = place.leads or stops
        self._thread = (
            ThreadPoolExecutor(1, "fastsiam-rank") if works_beside(place.device) else None
        )
        # Ranks stop together: at a step that all of them know, not when a thread is done.
        self._settles_early = self._thread is None or place.world == 1 or not stops
        self._gauges = Gauges(log, console=console, device=place.device) if log else None
        self._line: tuple[dict[str, Any], Future[Tensor]] | None = None
        """The line that is still to be written, and its effective rank."""

    def note(self, done: int, loss: Tensor) -> None:
        """Note a step's loss; does not wait for the device, nor for the thread.

        Raises:
            TrainingError: the representation collapsed at the last log point, and the run shall
                stop then.
        """
        self._finite.note(done, loss)
        self._settle_early()

    def check_images(self, batch: Batch) -> None:
        """Warn if most pixels of a batch have one value; waits for the device."""
        if self._judges and (warning := self._guard.check_images(flat_share(batch.view1).item())):
            self._console.warn(warning)

    def note_untrained(self, embedding: Tensor) -> None:
        """Measure the embeddings of the first step, which precede all training; every rank does.

        They are what a collapse is judged by. A resumed run finds them in the log.

        Args:
            embedding: (n, dim) of this rank.
        """
        spread = z_std(gather(embedding)).item()
        self._guard.begin(spread)
        if self._log and self._initial is None:
            self._log.write("initial", {"step": 0, "epoch": 0.0, "z_std": spread})

    def check_finite(self, done: int, *, saved: object) -> None:
        """Refuse to continue after a loss or a weight that is not finite; waits for the device.

        Raises:
            TrainingError: names the first bad step, and says what is ``saved``.
        """
        self._finite.note_weights(done, self._step.method)
        bad = self._finite.verdict()
        if bad is not None:
            raise TrainingError(
                f"{NOT_FINITE} at step {bad:,}; {saved}; try a lower --lr or --precision fp32"
            )

    def log(self, done: int, loss: Tensor, embedding: Tensor) -> None:
        """Take the metrics after so many steps, to be written and shown; waits for the device.

        Raises:
            TrainingError: as ``settle``.
        """
        self.settle()
        self._digest.share()
        z = gather(embedding)
        # The host waits once: when it has the two numbers, what was sent before is there as well.
        products = gram(z).to("cpu", non_blocking=True)
        numbers = torch.stack([mean_across_ranks(loss).double(), z_std(z).double()])
        mean, spread = numbers.tolist()
        self._clock.pause()
        values = {
            "step": done,
            "epoch": done / self._step.steps_per_epoch,
            "loss": mean,
            "z_std": spread,
            "rank": math.nan,  # until the line is written
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
        """Write and show the line that is still to be written, if there is one; waits for it.

        Before every checkpoint: what a resumed run finds in the log reaches up to its first step.

        Raises:
            TrainingError: the representation collapsed, and the run shall stop then.
        """
        if (values := self._write()) is None:
            return
        if warning := self._guard.check(values["step"], values["z_std"], values["rank"]):
            self._console.warn(warning)

    def close(self) -> None:
        """Write what is still to be written, without a verdict; end the thread and the log."""
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
        """Compute in the thread, or at once where there is none."""
        if self._thread:
            return self._thread.submit(function, argument)
        done: Future[Tensor] = Future()
        done.set_result(function(argument))
        return done


def works_beside(device: torch.device) -> bool:
    """Tell whether the host is free for other work while a device trains."""
    return device.type == "cuda"


class Evaluations:
    """Evaluates the features every so many epochs, and after the last.

    Args:
        evaluate: the evaluation; None if there is none.
        config: how often.
        step: the training step.
        console: where rank 0 says what was found.
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
        """Tell whether it is time for one, after so many steps."""
        epoch, within = divmod(done, self._step.steps_per_epoch)
        if self._evaluate is None or within:
            return False
        if not epoch:
            return self._config.knn_first
        return epoch % self._config.knn_every == 0 or done == self._step.total

    def run(self, done: int, log: MetricsLog | None, *, watched: Watched) -> None:
        """Evaluate, and write and say what was found; every rank takes part.

        Args:
            done: steps done.
            log: where rank 0 writes; None on the others.
            watched: what the evaluation takes its batches through.
        """
        assert self._evaluate is not None
        epoch = done / self._step.steps_per_epoch
        result = self._evaluate(self._step.method.backbone, watched=watched)
        if log:
            log.write("knn", {"epoch": epoch, **result.record()})
        self._console.say(f"epoch {epoch:g}: {result}")
