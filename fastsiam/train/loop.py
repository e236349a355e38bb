"""The training loop. The loader and the evaluation are arguments."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torch import Tensor

from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import Signalled, StopSignals
from fastsiam.errors import (
    CheckpointError,
    FastSiamError,
    ImageError,
    Interrupted,
    TrainingError,
)
from fastsiam.files import quoted
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import initial_spread
from fastsiam.train.clock import Clock
from fastsiam.train.data_digest import DataDigest
from fastsiam.train.memory import oom_error
from fastsiam.train.monitor import Evaluate, Evaluations, LogPoints, metrics_log
from fastsiam.train.saving import Saver
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader


def last_step(config: TrainConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of a run: the whole schedule, or ``max_steps`` if that is less."""
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
) -> Path:
    """Train a method and return the path of its last checkpoint.

    Args:
        take_step: the training step, prepared; every rank calls this function with its own.
        loader: batches of this rank, on its device.
        folder: the run's, for metrics and checkpoints.
        start: the checkpoint to resume from, of the same settings (``Checkpoint.check_continues``).
            On a CPU with the same number of threads, the results are the same bits as those of an
            uninterrupted run.
        knn: evaluates the backbone; every rank calls it.
        console: shows the progress on rank 0.
        before_saving: every rank calls it before each checkpoint.

    Raises:
        Interrupted: a signal stopped the run; the state is saved.
        TrainingError: the loss is not finite, or the representation collapsed and
            ``on_collapse`` is "stop".
        DataError: an image cannot be read; all ranks save the state first.
        OtherRankError: another rank failed, and prints the reason.
    """
    if start is not None:
        take_step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
    console = console or Console(quiet=not take_step.place.is_leader)
    run = _Run(take_step, loader, folder, start, knn, console, before_saving)
    clock, stop, total = run.clock, run.stop, take_step.total
    if run.done >= run.end:
        more = "--max-steps 0 continues" if run.done < total else "--extend N trains longer"
        at = f"{run.saver.path} is at step {run.done:,} of {total:,}"
        console.say(f"nothing left to do: {at}; {more}")
    with closing(run.points):
        with stop, console.progress(run.end, run.done), run.saved_whatever_ends_it():
            while run.done < run.end:
                run.evaluate_if_due()
                epoch, skip = divmod(run.done, take_step.steps_per_epoch)
                take_step.method.train()
                clock.resume()
                for batch in clock.over(stop.over(loader.epoch(epoch, skip=skip))):
                    loss, embedding = take_step(batch, at=run.done)
                    run.note_step(batch, loss, embedding)
                    run.log_and_save()
                    if run.done == run.end:
                        break
                clock.pause(after_steps=run.evaluations.due(run.done))
            run.saver.save(run.done)
            if run.done == total:
                run.evaluate_if_due()
        if not run.is_at_its_start:
            ended = "done" if run.done == total else f"stopped by --max-steps {run.end}"
            console.say(f"{ended}: step {run.done:,} of {total:,}, saved {run.saver.path}")
    return run.saver.path


class _Run:
    """Progress of a run: logs, evaluates and saves it, also when a signal or an error ends it."""

    def __init__(
        self,
        take_step: TrainingStep,
        loader: Loader,
        folder: RunFolder,
        start: Checkpoint | None,
        knn: Evaluate | None,
        console: Console,
        before_saving: Callable[[], None],
    ) -> None:
        config, place = take_step.config, take_step.place
        self.take_step, self.console = take_step, console
        self.first = self.done = 0 if start is None else start.step
        """Steps taken before this process started, and so far."""
        self.end = last_step(config, take_step.steps_per_epoch)
        self.unlogged: tuple[Tensor, Tensor] | None = None
        """Loss and embedding of the last step, until they are logged."""
        self.stop = StopSignals(place)
        self.clock = Clock(0.0 if start is None else start.seconds, device=place.device)
        self.digest = DataDigest(start, world=place.world)
        self.saver = Saver(
            folder,
            take_step,
            clock=self.clock,
            digest=self.digest,
            images=loader.images,
            start=start,
            before=before_saving,
        )
        self.evaluations = Evaluations(knn, config=config.monitor, step=take_step, console=console)
        evaluates = self.done < self.end or self.done == take_step.total
        self.log = metrics_log(
            folder,
            take_step,
            done=self.done,
            end=self.end,
            evaluates_again=evaluates and self.evaluations.due(self.done),
        )
        self.points = LogPoints(
            take_step,
            log=self.log,
            console=console,
            clock=self.clock,
            digest=self.digest,
            end=self.end,
            loader=loader,
            initial=initial_spread(folder.path),
        )

    @property
    def is_at_its_start(self) -> bool:
        """Whether this process has taken no step yet."""
        return self.done == self.first

    def evaluate_if_due(self) -> None:
        """Evaluate where the settings say so, after saving; every rank calls it."""
        self.points.settle()  # loaders may fork here, which is unsafe while a thread is working
        if self.evaluations.due(self.done):
            if self.unlogged:
                self.points.check_finite(self.done, saved=self.saver)
            if self.done:
                self.saver.try_to(self.done)  # an evaluation takes minutes and may be killed
            self.evaluations.run(self.done, self.log, watched=self.stop.over)

    def note_step(self, batch: Batch, loss: Tensor, embedding: Tensor) -> None:
        """Note a step that was just taken; nothing waits for the device after the first one."""
        if self.done == 0:
            self.points.note_untrained(embedding)
        self.unlogged = loss, embedding
        self.done += 1
        self.digest.add(batch.seen)
        self.points.note(self.done, loss)

    def log_and_save(self) -> None:
        """Log and save after a step where the settings say so.

        Both make the host wait for the device: logging reads losses and embeddings, saving reads
        all weights.
        """
        run, ends = self.take_step.config.run, self.done == self.end
        logs = ends or self.done % run.log_every == 0
        saves = ends or self.done % run.save_every == 0
        if not (logs or saves):
            return
        self.points.check_finite(self.done, saved=self.saver)
        if logs:
            self._log()
        self.clock.pause()
        if saves:
            self.points.settle()
            (self.saver.save if ends else self.saver.try_to)(self.done)
        self.clock.resume()

    def _log(self) -> None:
        """Log the last step, unless it is logged already."""
        if self.unlogged:
            self.points.log(self.done, *self.unlogged)
            self.unlogged = None

    @contextmanager
    def saved_whatever_ends_it(self) -> Iterator[None]:
        """Save the run when a signal or an error that all ranks know of ends the block.

        Raises:
            Interrupted: a signal ended it; the message names the checkpoint.
            TrainingError: a step ran out of memory.
        """
        try:
            yield
        except Signalled as asked:
            if self.unlogged:
                self.points.check_finite(self.done, saved=self.saver)
                self._log()
            self.clock.pause()
            self.points.settle()
            self.saver.save(self.done)
            raise self._interrupted(asked.number) from asked
        except (TrainingError, CheckpointError):
            raise
        except KeyboardInterrupt:  # SIGINT arrived before StopSignals took over
            if self.is_at_its_start:
                raise
            raise self._interrupted(signal.SIGINT) from None
        except FastSiamError as error:
            if self.take_step.place.world == 1 or self.stop.is_known_to_all(error):
                self._save_for(error)
            raise
        except (RuntimeError, MemoryError) as error:
            config = self.take_step.config
            if lacking := oom_error(error, config, at=self.done + 1, saved=self.saver):
                raise lacking from error
            raise

    def _interrupted(self, signalled: int) -> Interrupted:
        name, path = signal.Signals(signalled).name, self.saver.path
        return Interrupted(
            f"{name}: stopped after step {self.done:,}, saved {path}; "
            f"--resume {quoted(path.parents[1])} continues from there",
            exit_code=128 + signalled,
        )

    def _save_for(self, error: FastSiamError) -> None:
        """Save before an error that all ranks know of ends the run; add the path to the error."""
        try:
            self.points.check_finite(self.done, saved=self.saver)
            self.points.settle()
            saved = self.saver.save(self.done)
        except FastSiamError as failure:  # the first error is the one to raise
            error.add_note(f"step {self.done:,} could not be saved: {failure}")
        else:
            error.add_note(f"saved {saved} at step {self.done:,}{_way_on(error)}")
        finally:
            self.stop.meet()  # the launcher kills the other ranks when one exits


def _way_on(error: FastSiamError) -> str:
    """Return how to continue if a bad image ended the run, else an empty string."""
    if isinstance(error, ImageError):
        return "; --bad-images replace continues with another image in its place"
    return ""
