"""The training loop.

The loader and the evaluation are arguments; nothing here knows where images come from.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

from torch import Tensor

from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import Signalled, StopSignals
from fastsiam.errors import (
    CheckpointError,
    FastSiamError,
    ImageError,
    Interrupted,
    TrainingError,
)
from fastsiam.files import quoted
from fastsiam.training.clock import Clock, Forecast
from fastsiam.training.data_digest import DataDigest
from fastsiam.training.folder import RunFolder
from fastsiam.training.monitor import Evaluate, Evaluations, LogPoints, metrics_log
from fastsiam.training.oom import oom_error
from fastsiam.training.saving import Saver
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Batch, Loader


def last_step(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return how many steps a run takes: its whole schedule, or ``max_steps`` of it."""
    total = config.optim.epochs * steps_per_epoch
    return min(total, config.run.max_steps or total)


def train(
    take_step: TrainingStep,
    loader: Loader,
    *,
    folder: RunFolder,
    start: Checkpoint | None = None,
    knn: Evaluate | None = None,
    console: Console | None = None,
    before_saving: Callable[[], None] = lambda: None,
    opening: float = 0.0,
) -> Path:
    """Train a method and return the path of its last checkpoint.

    Args:
        take_step: the training step, prepared; every rank calls this function with its own.
        loader: batches of this rank, on its device.
        folder: the run's, for metrics and checkpoints.
        start: the run's last checkpoint, of the same settings (``Checkpoint.check_continues``), to
            go on from; on a CPU with as many threads, bit for bit as if never interrupted.
        knn: evaluates a backbone; every rank calls it.
        console: where rank 0 shows the progress.
        before_saving: every rank calls it before each checkpoint.
        opening: how long the loader took to open, in seconds.

    Raises:
        Interrupted: a signal asked to stop; the state is saved.
        TrainingError: the loss is not finite, or the representation collapsed and the run shall
            stop.
        DataError: an image cannot be read; the state is saved first, by all ranks together.
        OtherRankError: as much on another rank, which says what it is.
    """
    console = console or Console(quiet=not take_step.place.leads)
    if start is not None:
        take_step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
    training = _Training(take_step, loader, folder, start, knn, console, before_saving, opening)
    return training.run()


class _Training:
    """A run at work: its steps, and what is logged, saved and evaluated between them."""

    def __init__(
        self,
        take_step: TrainingStep,
        loader: Loader,
        folder: RunFolder,
        start: Checkpoint | None,
        knn: Evaluate | None,
        console: Console,
        before_saving: Callable[[], None],
        opening: float,
    ) -> None:
        config, place = take_step.config, take_step.place
        self._take_step, self._loader, self._folder, self._console = (
            take_step, loader, folder, console,
        )  # fmt: skip
        self._run, self._place = config.run, place
        self._per_epoch, self._total = take_step.steps_per_epoch, take_step.total
        self._done = self._first = 0 if start is None else start.step
        """Steps that are taken, and that were when this process began."""
        self._end = last_step(config, self._per_epoch)
        self._clock = Clock(0.0 if start is None else start.seconds, device=place.device)
        self._digest = DataDigest(start, world=place.world)
        self._saver = Saver(
            folder,
            take_step,
            clock=self._clock,
            digest=self._digest,
            images=loader.images,
            start=start,
            before=before_saving,
        )
        self._evaluations = Evaluations(knn, config=config.monitor, step=take_step, console=console)
        again = self._evaluations.due(self._done)
        self._log = metrics_log(
            folder, take_step, done=self._done, end=self._end, evaluates_again=again
        )
        self._points = LogPoints(
            take_step,
            log=self._log,
            console=console,
            clock=self._clock,
            digest=self._digest,
            end=self._end,
        )
        self._unlogged: tuple[Tensor, Tensor] | None = None
        """Loss and embedding of the last step, until they are logged."""
        self._stop = StopSignals(place, grace=self._run.grace)
        self._forecast = Forecast(
            self._clock, last=self._per_epoch * (self._done // self._per_epoch + 1) - 1
        )
        self._opening = opening

    def run(self) -> Path:
        """Take the steps that are left."""
        saver, total = self._saver, self._total
        if self._done >= self._end:
            more = "--max-steps 0 continues" if self._done < total else "--extend N trains longer"
            said = f"nothing left to do: {saver.path} is at step {self._done:,} of {total:,}"
            self._console.say(f"{said}; {more}")
        try:
            with self._stop, self._console.progress(self._end, self._done):
                try:
                    while self._done < self._end:
                        self._evaluate()
                        self._train_epoch()
                    saver.save(self._done)
                    if self._done == total:
                        self._evaluate()
                except Signalled as asked:
                    self._leave(asked.number)
                except (TrainingError, CheckpointError):
                    raise
                except KeyboardInterrupt:  # where SIGINT was handled before the run began
                    if self._done == self._first:
                        raise
                    raise self._interrupted(signal.SIGINT) from None
                except FastSiamError as error:
                    if self._place.world == 1 or self._stop.is_known_to_all(error):
                        self._save_for(error)
                    raise
                except (RuntimeError, MemoryError) as error:
                    config, at = self._take_step.config, self._done + 1
                    if lacking := oom_error(error, config, self._place, at=at, saved=saver):
                        raise lacking from error
                    raise
            self._console.say(
                f"{'done' if self._done == total else f'stopped by --max-steps {self._end}'}: "
                f"step {self._done:,} of {total:,}, saved {saver.path}"
            )
        finally:
            with closing(self._log) if self._log else nullcontext():
                self._points.close()
        return saver.path

    def _evaluate(self) -> None:
        """Evaluate the features if it is time for it."""
        self._points.settle()  # loaders may fork here, which threads at work do not go well with
        if not self._evaluations.due(self._done):
            return
        if self._done:
            self._saver.try_to(self._done)  # it takes minutes, and a scheduler's patience less
        self._evaluations.run(self._done, self._log, watched=self._stop.over)

    def _train_epoch(self) -> None:
        """Take the steps that are left of an epoch, or of the run."""
        epoch, skip = divmod(self._done, self._per_epoch)
        self._take_step.method.train()
        self._clock.resume()
        self._began = time.monotonic()
        batches = self._stop.over(self._loader.epoch(epoch, skip=skip))
        for batch in self._clock.over(batches):
            self._step(batch)
            if self._done == self._end:
                break
        self._clock.pause(after_steps=self._evaluations.due(self._done))

    def _step(self, batch: Batch) -> None:
        """Take a step; log and save if it is time for it."""
        if self._done == self._first:  # kernels may have been compiled, data decoded
            took = self._opening + time.monotonic() - self._began
            self._console.say(
                f"first batch after {took:.1f} s ({self._opening:.1f} s to open the loader)"
            )
            self._points.check_images(batch)
        self._unlogged = self._take_step(batch, at=self._done)
        self._done += 1
        self._digest.add(batch.seen)
        self._points.note(self._done, self._unlogged[0])
        if (each := self._forecast.note(self._done)) and self._done < self._end:
            config, left = self._take_step.config, self._end - self._done
            self._console.say(_outlook(each, config, self._per_epoch, left))
        ends = self._done == self._end
        logs = ends or self._done % self._run.log_every == 0
        saves = ends or self._done % self._run.save_every == 0
        if not (logs or saves):
            return
        # From here on the host waits for the device: the check reads the losses, the log their
        # mean and the embeddings, and a checkpoint every weight.
        self._check_finite()
        if logs:
            self._log_step()
        self._clock.pause()
        if saves:
            self._points.settle()
            (self._saver.save if ends else self._saver.try_to)(self._done)
        self._clock.resume()

    def _check_finite(self) -> None:
        self._points.check_finite(self._done, saved=self._saver)

    def _log_step(self) -> None:
        """Log the last step, unless that is done."""
        if self._unlogged:
            loss, embedding = self._unlogged
            self._points.log(self._done, loss, embedding)
            self._unlogged = None

    def _leave(self, signalled: int) -> None:
        """Log and save what was done until a signal came.

        Raises:
            Interrupted: says where it is saved.
        """
        if self._unlogged:
            self._check_finite()
            self._log_step()
        self._clock.pause()
        self._points.settle()
        self._saver.save(self._done)
        raise self._interrupted(signalled)

    def _interrupted(self, signalled: int) -> Interrupted:
        name = signal.Signals(signalled).name
        return Interrupted(
            f"{name}: stopped after step {self._done:,}, saved {self._saver.path}; "
            f"--resume {quoted(self._folder.path)} goes on from there",
            exit_code=128 + signalled,
        )

    def _save_for(self, error: FastSiamError) -> None:
        """Save before the run ends by an error, of which all ranks know; add to it where."""
        try:
            self._check_finite()
            self._points.settle()
            saved = self._saver.save(self._done)
        except FastSiamError as failure:  # the error is what ends the run
            error.add_note(f"and step {self._done:,} is not saved: {failure}")
        else:
            error.add_note(f"saved {saved} at step {self._done:,}{_way_on(error)}")
        finally:
            self._stop.meet()  # the launcher ends the others when the first one leaves


def _outlook(each: float, config: TrainConfig, per_epoch: int, left: int) -> str:
    """Say how long an epoch takes and what is left of the run, if a step takes so many seconds."""
    speed = config.optim.batch / each
    return (
        f"at {speed:,.{0 if speed >= 10 else 1}f} images/s an epoch takes about "
        f"{duration(each * per_epoch)}, the {left:,} steps that are left {duration(each * left)}"
        f"{', evaluations apart' if config.monitor.knn_every else ''}"
    )


def _way_on(error: FastSiamError) -> str:
    """Say how a run goes on, if it is one image that ends it."""
    if isinstance(error, ImageError):
        return "; with another one in its place it goes on by --bad-images replace"
    return ""
