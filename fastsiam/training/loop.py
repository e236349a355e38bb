"""The training loop.

The loader and the evaluation are arguments; nothing here knows where images come from.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fastsiam import checkpoint as checkpoints
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import Place, StopSignals, gather, mean_across_ranks
from fastsiam.errors import CheckpointError, FastSiamError, Interrupted, TrainingError
from fastsiam.evaluate.knn import KnnResult
from fastsiam.methods import SimSiam
from fastsiam.training.metrics import (
    Clock,
    CollapseGuard,
    FiniteCheck,
    MetricsLog,
    effective_rank,
    z_std,
)
from fastsiam.training.optim import lr_at
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Loader


def train(
    config: TrainConfig,
    method: SimSiam,
    loader: Loader,
    place: Place,
    *,
    run: Path,
    start: Checkpoint | None = None,
    knn: Callable[[nn.Module], KnnResult] | None = None,
    console: Console | None = None,
) -> Path:
    """Train a method and return the path of its last checkpoint.

    Args:
        config: all settings.
        method: fresh from ``build_method``; it is trained in place.
        loader: batches of this rank, on ``place.device``.
        place: this rank; every rank calls this function.
        run: folder for metrics and checkpoints.
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
    console = console or Console(quiet=not place.leads)
    step, clock = 0, Clock()
    take_step = TrainingStep(config, method, place)
    if start is not None:
        step, clock = start.step, Clock(start.seconds)
        take_step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)

    per_epoch = loader.steps
    total = config.optim.epochs * per_epoch
    end = min(total, config.run.max_steps or total)
    path = checkpoints.last(run)
    saved = None if start is None else step

    def knn_due() -> bool:
        every, (epoch, within) = config.monitor.knn_every, divmod(step, per_epoch)
        due = every > 0 and within == 0 and (epoch % every == 0 or step == total)
        return due and knn is not None

    log = None
    if place.leads:
        log = MetricsLog(run, step=step, steps_per_epoch=per_epoch, evaluates_again=knn_due())
    finite, guard = (
        FiniteCheck(place.device),
        CollapseGuard(config.monitor.on_collapse, batch=config.optim.batch),
    )

    def check_finite() -> None:
        bad = finite.verdict()
        if bad is None and not all_finite(method):
            bad = step
        if bad is not None:
            last = "nothing was saved yet"
            if saved is not None:
                last = f"the last good checkpoint is {path} (step {saved:,})"
            raise TrainingError(
                f"the loss is not finite at step {bad:,}; {last}; "
                "try a lower --lr or --precision fp32"
            )

    def save() -> None:
        nonlocal saved
        if saved == step:
            return
        if place.leads:
            state = Checkpoint(
                config=config,
                step=step,
                seconds=clock.seconds,
                images=loader.images,
                steps_per_epoch=per_epoch,
                **take_step.state(),
            )
            checkpoints.save(path, state)
        saved = step

    def evaluate_if_due() -> None:
        if knn is not None and knn_due():
            result = knn(method.backbone)
            if log:
                log.write("knn", {"epoch": step / per_epoch, **result.record()})
            console.say(f"epoch {step / per_epoch:g}: {result}")

    if step >= end:
        console.say(f"nothing left to do: {path} is at step {step:,} of {total:,}")
    elif line := take_step.prepare():
        console.say(line)
        if not take_step.compiled and not config.step.cuda_graphs:
            config = replace(config, step=replace(config.step, compile="off"))  # also when resumed
    began, first = time.monotonic(), step
    try:
        with StopSignals(place) as stop, console.progress(end, step):
            while step < end:
                epoch, skip = divmod(step, per_epoch)
                if step and knn_due():
                    save()  # an evaluation can take minutes, and a scheduler's patience less
                evaluate_if_due()
                method.train()
                for batch in clock.over(loader.epoch(epoch, skip=skip)):
                    if step == first:  # kernels may have been compiled, data decoded
                        console.say(f"first batch after {time.monotonic() - began:.1f} s")
                    rates = lr_at(config.optim, step, per_epoch)
                    loss, z = take_step(batch, rates)
                    step += 1
                    finite.note(step, loss)
                    signalled = stop.after_step()
                    leaving = bool(signalled) or step == end
                    log_due, save_due = (
                        step % config.run.log_every == 0,
                        step % config.run.save_every == 0,
                    )
                    if not (log_due or save_due or leaving):
                        continue
                    # From here on the host waits for the device.
                    check_finite()
                    if log_due or leaving:
                        z = gather(z)
                        values = {
                            "step": step,
                            "epoch": step / per_epoch,
                            "loss": mean_across_ranks(loss).item(),
                            "z_std": z_std(z).item(),
                            "rank": effective_rank(z).item(),
                            "lr": rates["encoder"],
                        }
                        clock.pause()
                        values |= clock.read(config.optim.batch)
                        if log:
                            log.write("train", values)
                        console.show(values, remaining=end - step, batch=config.optim.batch)
                        if warning := guard.check(step, values["z_std"], values["rank"]):
                            console.warn(warning)
                    clock.pause()
                    if save_due or leaving:
                        save()
                    if signalled:
                        name = signal.Signals(signalled).name
                        raise Interrupted(
                            f"{name}: stopped after step {step:,}, saved {path}; "
                            "the same command goes on from there",
                            exit_code=128 + signalled,
                        )
                    if step == end:
                        break
                    clock.resume()
        save()
        if step == total:
            evaluate_if_due()
        reason = "done" if step == total else f"stopped by --max-steps {config.run.max_steps}"
        console.say(f"{reason}: step {step:,} of {total:,}, saved {path}")
    except (TrainingError, CheckpointError, Interrupted):
        raise
    except FastSiamError as error:
        if place.world > 1:  # the other ranks know nothing of it: no saving together
            raise
        check_finite()
        save()
        raise type(error)(f"{error} (saved {path} at step {step:,})") from error
    finally:
        if log:
            log.close()
    return path


def all_finite(module: nn.Module) -> bool:
    """Tell whether every parameter is a number; waits for the device."""
    return bool(torch.stack([p.isfinite().all() for p in module.parameters()]).all())
