"""The training loop.

The loader and the evaluation are arguments; nothing here knows where images come from.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, nullcontext
from pathlib import Path

from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import StopSignals
from fastsiam.errors import CheckpointError, DataError, FastSiamError, Interrupted, TrainingError
from fastsiam.files import quoted
from fastsiam.training.clock import Clock, Forecast
from fastsiam.training.folder import RunFolder
from fastsiam.training.monitor import Evaluate, Evaluations, LogPoints, metrics_log
from fastsiam.training.saving import Saver
from fastsiam.training.seen import Seen
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Loader


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

    Raises:
        Interrupted: SIGINT or SIGTERM; the state is saved.
        TrainingError: the loss is not finite, or the representation collapsed and the run shall
            stop.
        DataError: an image cannot be read; a single process saves the state first.
    """
    config, method, place = take_step.config, take_step.method, take_step.place
    console = console or Console(quiet=not place.leads)
    per_epoch, total = take_step.steps_per_epoch, take_step.total
    step, end = 0 if start is None else start.step, last_step(config, per_epoch)
    if start is not None:
        take_step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
    clock = Clock(0.0 if start is None else start.seconds, device=place.device)
    seen = Seen(start, world=place.world)
    saver = Saver(folder, take_step, clock=clock, seen=seen, images=loader.images, start=start)
    evaluations = Evaluations(knn, config=config.monitor, step=take_step, console=console)
    again = evaluations.due(step)
    log = metrics_log(folder, take_step, done=step, end=end, evaluates_again=again)
    points = LogPoints(take_step, log=log, console=console, clock=clock, seen=seen, end=end)
    if step >= end:
        more = "; --max-steps 0 goes on" if step < total else ""
        console.say(f"nothing left to do: {saver.path} is at step {step:,} of {total:,}{more}")
    began, first = time.monotonic(), step
    forecast = Forecast(clock, last=per_epoch * (step // per_epoch + 1) - 1)
    try:
        with StopSignals(place) as stop, console.progress(end, step):
            while step < end:
                points.settle()  # loaders may fork here, which threads at work do not go well with
                epoch, skip = divmod(step, per_epoch)
                if evaluations.due(step):
                    if step:
                        seen.share()
                        saver.try_to(step)  # it can take minutes, and a scheduler's patience less
                    evaluations.run(step, log)
                method.train()
                clock.resume()
                for batch in clock.over(loader.epoch(epoch, skip=skip)):
                    if step == first:  # kernels may have been compiled, data decoded
                        console.say(f"first batch after {time.monotonic() - began:.1f} s")
                    loss, embedding = take_step(batch, at=step)
                    step += 1
                    seen.add(batch.seen)
                    points.note(step, loss)
                    if (each := forecast.note(step)) and step < end:
                        console.say(_outlook(each, config, per_epoch, end - step))
                    signalled = stop.after_step()
                    leaving = bool(signalled) or step == end
                    log_due = leaving or step % config.run.log_every == 0
                    save_due = leaving or step % config.run.save_every == 0
                    if not (log_due or save_due):
                        continue
                    # From here on the host waits for the device: the check reads the losses, the
                    # log their mean and the embeddings, and a checkpoint every weight.
                    points.check_finite(step, saved=saver)
                    seen.share()
                    if log_due:
                        points.log(step, loss, embedding)
                    clock.pause()
                    if save_due:
                        points.settle()
                        (saver.save if leaving else saver.try_to)(step)
                    if signalled:
                        raise _interrupted(signalled, step, folder.path, saver.path)
                    if step == end:
                        break
                    clock.resume()
                clock.pause(after_steps=evaluations.due(step))
        saver.save(step)
        if step == total and evaluations.due(step):
            evaluations.run(step, log)
        reason = "done" if step == total else f"stopped by --max-steps {config.run.max_steps}"
        console.say(f"{reason}: step {step:,} of {total:,}, saved {saver.path}")
    except (TrainingError, CheckpointError, Interrupted):
        raise
    except KeyboardInterrupt:
        if step == first:
            raise
        raise _interrupted(signal.SIGINT, step, folder.path, saver.path) from None
    except FastSiamError as error:
        if place.world == 1:  # the other ranks know nothing of it: no saving together
            points.check_finite(step, saved=saver)
            points.settle()
            without = "; without the image it goes on by --data-changed accept"
            said = without if isinstance(error, DataError) else ""
            error.add_note(f"saved {saver.save(step)} at step {step:,}{said}")
        raise
    finally:
        with closing(log) if log else nullcontext():
            points.close()
    return saver.path


def _outlook(each: float, config: TrainConfig, per_epoch: int, left: int) -> str:
    """Say how long an epoch takes and what is left of the run, if a step takes so many seconds."""
    speed = config.optim.batch / each
    return (
        f"at {speed:,.{0 if speed >= 10 else 1}f} images/s an epoch takes about "
        f"{duration(each * per_epoch)}, the {left:,} steps that are left {duration(each * left)}"
        f"{', evaluations apart' if config.monitor.knn_every else ''}"
    )


def _interrupted(signalled: int, step: int, run: Path, saved: Path) -> Interrupted:
    name = signal.Signals(signalled).name
    return Interrupted(
        f"{name}: stopped after step {step:,}, saved {saved}; "
        f"--resume {quoted(run)} goes on from there",
        exit_code=128 + signalled,
    )
