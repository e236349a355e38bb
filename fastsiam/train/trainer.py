"""The training loop of a run, with evaluation and error handling."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from fastsiam.config import TrainConfig
from fastsiam.distributed import Signalled, StopSignals
from fastsiam.errors import (
    NOT_FINITE,
    CheckpointError,
    DataError,
    FastSiamError,
    ImageError,
    Interrupted,
    TrainingError,
)
from fastsiam.evaluate.knn import KnnResult
from fastsiam.files import quote
from fastsiam.model.numerics import FiniteCheck
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.run_folder import RunFolder
from fastsiam.run.trackers import Outcome
from fastsiam.train.clock import Clock
from fastsiam.train.memory import check_memory
from fastsiam.train.metrics import StepMetrics
from fastsiam.train.saver import Saver
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader

Evaluate = Callable[[nn.Module, StopSignals], KnnResult]
"""Function that evaluates a backbone; every rank must call it. It iterates over its batches with
``StopSignals.over``, so that a signal can interrupt it."""


def last_step(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the number of steps after which a run ends: ``max_steps`` or the entire schedule."""
    total = config.optim.epochs * steps_per_epoch
    return min(total, config.run.max_steps or total)


class Trainer:
    """Trainer of a run. Every rank creates one and calls the same methods; ``close`` it at the end.

    Args:
        step: the training step, after ``prepare``.
        loader: batches of this rank, on its device.
        folder: the run's folder, for metrics and checkpoints; its console shows the progress.
        start: checkpoint to resume from, with the same settings. On a CPU with the same number of
            threads, the results are bitwise identical to those of an uninterrupted run.
        knn: evaluates the backbone every ``knn_every`` epochs and after the last epoch.
        before_saving: called on every rank before each checkpoint, for example to exchange data.
    """

    def __init__(
        self,
        step: TrainingStep,
        loader: Loader,
        *,
        folder: RunFolder,
        start: Checkpoint | None = None,
        knn: Evaluate | None = None,
        before_saving: Callable[[], None] = lambda: None,
    ) -> None:
        config, place = step.config, step.place
        if start is not None:
            step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
        self._step, self._loader, self._knn, self._console = step, loader, knn, folder.console
        self.done = self.first = 0 if start is None else start.step
        """Number of steps taken so far (``done``) and before this process started (``first``)."""
        self.end = last_step(config, step.steps_per_epoch)
        """Number of steps after which the run ends."""
        self._folder = folder.path
        self._stop = StopSignals(place)
        self._clock = Clock(0.0 if start is None else start.seconds, device=place.device)
        self.finite = FiniteCheck(place.device)
        self._checked: int | None = None
        """Number of steps when ``check_finite`` last found all values finite."""
        self.metrics = StepMetrics(
            step, loader, self._clock, folder=folder, start=start, end=self.end
        )
        self._saver = Saver(
            step,
            loader,
            self._clock,
            self.metrics,
            folder=folder,
            start=start,
            before_saving=before_saving,
        )
        self._outcome: Outcome = "FAILED"
        """How the run ended, for the trackers."""

    def run(self) -> None:
        """Train until the last step.

        Raises:
            Interrupted: a signal stopped the run; the state is saved.
            TrainingError: the loss is not finite, memory ran out, or the representation collapsed
                and ``on_collapse`` is "stop".
            DataError: an image cannot be read; all ranks save the state first.
            OtherRankError: another rank failed; that rank prints the reason.
        """
        step, run, total = self._step, self._step.config.run, self._step.total
        progress = self._console.progress(self.end, self.done)
        with self._stop, progress, self._save_on_exit():
            while self.done < self.end:
                self._evaluate_if_due()
                step.method.train()
                self._clock.resume()
                for batch in self._clock.over(self._stop.over(self._start_epoch())):
                    loss, embedding = step(batch, at=self.done)
                    self.metrics.note(self.done, batch, embedding)
                    self.done += 1
                    self.finite.note(self.done, loss)
                    is_last = self.done == self.end
                    if is_last or self.done % run.log_every == 0:
                        self.check_finite()
                        self.metrics.log(self.done, loss, embedding)
                    if is_last:
                        self._save()
                        break
                    if self.done % run.save_every == 0:
                        self._save(may_fail=True)
                    self._clock.resume()
            if self.done == total:
                self._evaluate_if_due()
        self._outcome = "FINISHED"
        position = f"step {self.done:,} of {total:,}"
        if self.done > self.first:
            outcome = "done" if self.done == total else f"stopped by --max-steps {self.end}"
            self._console.say(f"{outcome}: {position}, saved {self._saver.path}")
        else:
            hint = (
                "--max-steps 0 to continue" if self.done < total else "--extend N to train longer"
            )
            self._console.say(
                f"nothing left to do: {self._saver.path} is at {position}; pass {hint}"
            )

    def close(self) -> None:
        """Write the pending log line, and close the log."""
        self.metrics.close(self._outcome)

    def _start_epoch(self) -> Iterator[Batch]:
        """Return the batches from the next step to the end of its epoch."""
        epoch, skip = divmod(self.done, self._step.steps_per_epoch)
        try:
            return self._loader.epoch(epoch, skip=skip)
        except DataError as error:  # all ranks together have too many bad images
            self._stop.raise_on_all(error)

    def _evaluate_if_due(self) -> None:
        """Save and evaluate if an evaluation is due and was not done before the run was resumed."""
        self.metrics.settle()  # loaders may fork here, which is unsafe while a thread is working
        config = self._step.config
        epoch, remainder = divmod(self.done, self._step.steps_per_epoch)
        if self._knn is None or remainder:
            return
        if not config.monitor.evaluates_after(epoch, config.optim.epochs):
            return
        if self.done == self.first and self.metrics.start_is_evaluated():
            return
        self._clock.pause(after_steps=True)
        if self.done:
            self._save(may_fail=True)  # an evaluation takes minutes and may be killed
        self._evaluate()

    def _evaluate(self) -> None:
        assert self._knn is not None
        epoch = self.done / self._step.steps_per_epoch
        result = self._knn(self._step.method.backbone, self._stop)
        self.metrics.write("knn", {"epoch": epoch, **result.record()})
        self._console.say(f"epoch {epoch:g}: {result}")

    def check_finite(self) -> None:
        """Check that all losses and weights are finite; waits for the device.

        Raises:
            TrainingError: a value is not finite; names the first bad step and the last checkpoint.
        """
        if self._checked == self.done:
            return
        self.finite.note_weights(self.done, self._step.method)
        bad_step = self.finite.verdict()
        if bad_step is not None:
            raise TrainingError(
                f"{NOT_FINITE} at step {bad_step:,}; {self._saver.last_good}; try a lower --lr or "
                "--precision fp32"
            )
        self._checked = self.done

    def _save(self, *, may_fail: bool = False) -> None:
        """Save the state if all values are finite.

        Raises:
            TrainingError: as ``check_finite`` and ``StepMetrics.settle``; nothing is saved.
            FastSiamError: as ``Saver.save``.
        """
        # Collectives come first: every rank must take part in them.
        if self._saver.saved != self.done:
            self.check_finite()
        self._clock.pause()
        self.metrics.settle()
        self._saver.save(self.done, may_fail=may_fail)

    @contextmanager
    def _save_on_exit(self) -> Iterator[None]:
        """Save the run if a signal, or an error that all ranks know of, ends the block.

        Raises:
            Interrupted: a signal ended the block; the message names the checkpoint.
            TrainingError: a step ran out of memory.
        """
        try:
            yield
        except Signalled as stop:
            self._outcome = "KILLED"
            self._save()
            raise self.interrupted_error(stop.number) from stop
        except (TrainingError, CheckpointError):
            raise
        except FastSiamError as error:
            if self._step.place.world == 1 or self._stop.is_known_to_all(error):
                self._save_for(error)
            raise
        except (RuntimeError, MemoryError) as error:
            check_memory(error, self._step.config, at=self.done + 1, saved=self._saver.last_good)
            raise

    def interrupted_error(self, signalled: int) -> Interrupted:
        """Return the error to raise after a signal; it says what is saved and how to resume."""
        message = f"{signal.Signals(signalled).name}: stopped after step {self.done:,}"
        is_saved = self._saver.saved == self.done
        message += f", saved {self._saver.path}" if is_saved else f"; {self._saver.last_good}"
        if self._saver.saved is not None:
            message += f"; pass --resume {quote(self._folder)} to continue from there"
        return Interrupted(message, signalled)

    def _save_for(self, error: FastSiamError) -> None:
        """Save the run after an error that all ranks know of; add the path to the error."""
        hint = "; pass --bad-images replace to continue with another image in its place"
        note = (
            f"saved {self._saver.path} at step {self.done:,}{hint * isinstance(error, ImageError)}"
        )
        try:
            self._save()
        except FastSiamError as failure:  # the caller raises the original error
            if self._saver.saved != self.done:
                note = f"step {self.done:,} could not be saved: {failure}"
        finally:
            error.add_note(note)
            self._stop.meet()  # the launcher kills the other ranks when one exits
