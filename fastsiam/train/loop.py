"""The training loop. The loader and the evaluation are arguments."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

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
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import initial_spread
from fastsiam.train.clock import Clock, Forecast
from fastsiam.train.data_digest import DataDigest
from fastsiam.train.memory import oom_error
from fastsiam.train.monitor import Evaluate, Evaluations, LogPoints, metrics_log
from fastsiam.train.saving import Saver
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Loader


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
    opening: float = 0.0,
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
        opening: time that the loader took to open, in seconds.

    Raises:
        Interrupted: a signal stopped the run; the state is saved.
        TrainingError: the loss is not finite, or the representation collapsed and
            ``on_collapse`` is "stop".
        DataError: an image cannot be read; all ranks save the state first.
        OtherRankError: another rank failed, and prints the reason.
    """
    config, place = take_step.config, take_step.place
    console = console or Console(quiet=not place.is_leader)
    if start is not None:
        take_step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
    done, total = 0 if start is None else start.step, take_step.total
    per_epoch = take_step.steps_per_epoch
    end = last_step(config, per_epoch)
    stop = StopSignals(place, grace=config.run.grace)
    clock = Clock(0.0 if start is None else start.seconds, device=place.device)
    digest = DataDigest(start, world=place.world)
    saver = Saver(
        folder,
        take_step,
        clock=clock,
        digest=digest,
        images=loader.images,
        start=start,
        before=before_saving,
    )
    evaluations = Evaluations(knn, config=config.monitor, step=take_step, console=console)
    again = evaluations.due(done)
    log = metrics_log(folder, take_step, done=done, end=end, evaluates_again=again)
    points = LogPoints(
        take_step,
        log=log,
        console=console,
        clock=clock,
        digest=digest,
        end=end,
        initial=initial_spread(folder.path),
    )
    forecast = Forecast(clock, last=per_epoch * (done // per_epoch + 1) - 1)
    run = _Run(done, end, take_step, clock, points, saver, stop)
    if done >= end:
        more = "--max-steps 0 continues" if done < total else "--extend N trains longer"
        said = f"nothing left to do: {saver.path} is at step {done:,} of {total:,}"
        console.say(f"{said}; {more}")

    def evaluate() -> None:
        points.settle()  # loaders may fork here, which is unsafe while a thread is working
        if evaluations.due(run.done):
            if run.done:
                saver.try_to(run.done)  # an evaluation takes minutes and may be killed
            evaluations.run(run.done, log, watched=stop.over)

    with closing(points):
        with stop, console.progress(end, done), run.saved_whatever_ends_it():
            while run.done < end:
                evaluate()
                epoch, skip = divmod(run.done, per_epoch)
                take_step.method.train()
                clock.resume()
                for batch in clock.over(stop.over(loader.epoch(epoch, skip=skip))):
                    if run.done == done:
                        console.say(_first_batch(opening, clock.running))
                        points.check_images(batch)
                    run.unlogged = loss, embedding = take_step(batch, at=run.done)
                    if run.done == 0:
                        points.note_untrained(embedding)
                    run.done += 1
                    digest.add(batch.seen)
                    points.note(run.done, loss)
                    if (each := forecast.note(run.done)) and run.done < end:
                        console.say(_outlook(each, config, per_epoch, end - run.done))
                    run.log_and_save()
                    if run.done == end:
                        break
                clock.pause(after_steps=evaluations.due(run.done))
            saver.save(run.done)
            if run.done == total:
                evaluate()
        ended = "done" if run.done == total else f"stopped by --max-steps {end}"
        console.say(f"{ended}: step {run.done:,} of {total:,}, saved {saver.path}")
    return saver.path


@dataclass
class _Run:
    """Progress of a run: logs and saves it, also when a signal or an error ends it."""

    done: int
    """Steps taken so far."""
    end: int
    take_step: TrainingStep
    clock: Clock
    points: LogPoints
    saver: Saver
    stop: StopSignals
    unlogged: tuple[Tensor, Tensor] | None = None
    """Loss and embedding of the last step, until they are logged."""

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
        first = self.done
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
            if self.done == first:
                raise
            raise self._interrupted(signal.SIGINT) from None
        except FastSiamError as error:
            if self.take_step.place.world == 1 or self.stop.is_known_to_all(error):
                self._save_for(error)
            raise
        except (RuntimeError, MemoryError) as error:
            config, place, at = self.take_step.config, self.take_step.place, self.done + 1
            if lacking := oom_error(error, config, place, at=at, saved=self.saver):
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


def _first_batch(opening: float, waited: float) -> str:
    """Return a message with the time to the first batch, which may include compiling kernels."""
    return f"first batch after {opening + waited:.1f} s ({opening:.1f} s to open the loader)"


def _outlook(each: float, config: TrainConfig, per_epoch: int, left: int) -> str:
    """Return a message with the time of an epoch and of the rest of the run.

    Args:
        each: seconds of a step.
        config: of the run.
        per_epoch: steps in an epoch.
        left: steps until the run ends.
    """
    speed = config.optim.batch / each
    return (
        f"at {speed:,.{0 if speed >= 10 else 1}f} images/s an epoch takes about "
        f"{duration(each * per_epoch)}, the remaining {left:,} steps {duration(each * left)}"
        f"{', without evaluations' if config.monitor.knn_every else ''}"
    )


def _way_on(error: FastSiamError) -> str:
    """Return how to continue if a bad image ended the run, else an empty string."""
    if isinstance(error, ImageError):
        return "; --bad-images replace continues with another image in its place"
    return ""
