"""Some steps of a run trained again, from a checkpoint, and their losses held against the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from fastsiam import checkpoint as checkpoints
from fastsiam import distributed
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import Precision, RunConfig, TrainConfig
from fastsiam.config.verify import VerifyConfig
from fastsiam.console import tally
from fastsiam.distributed import Place
from fastsiam.errors import DeviceError, FastSiamError
from fastsiam.jobs.verify import Line, Recorded, require_same, with_pipeline
from fastsiam.methods import build_method
from fastsiam.pipelines import build_loader
from fastsiam.training.data_digest import DataDigest
from fastsiam.training.numerics import autocast_type
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Loader

_STEPS = 50
"""So many are replayed at most, if a log line is among them."""
_OFF_A_STEP = {"fp32": 1e-3, "bf16": 2e-3, "fp16": 2e-3}
_OFF_AT_MOST = 0.1


def tolerance(precision: Precision, steps: int) -> float:
    """Return how far a loss may be from the log's, so many steps after the checkpoint.

    Rounding differs on another machine or device, by other threads or ranks, and every step makes
    more of the difference: docs/verify.md has what was measured.
    """
    return min(_OFF_AT_MOST, steps * _OFF_A_STEP[precision])


@dataclass(frozen=True, slots=True)
class _Compared:
    """A log line, and the loss that was found in its place."""

    line: Line
    loss: float

    @property
    def difference(self) -> float:
        """How far the two are apart."""
        return abs(self.loss - self.line.loss)


def replay(recorded: Recorded, config: VerifyConfig) -> Iterator[str]:
    """Train from a checkpoint on, in memory, and compare; yield what was found.

    The log's losses are of all ranks; here one process takes the steps, with whole batches.

    Raises:
        CheckpointError: the checkpoint is of another run.
        FastSiamError: no log line comes after it, or a loss or digest differs.
    """
    file, start, lines = _beginning(recorded, config)
    place = distributed.start(RunConfig(device=config.device))
    start.check_continues(recorded.config)
    trained = _here(recorded.config, place)
    loader = build_loader(
        with_pipeline(trained.data, config.pipeline),
        trained.augment,
        batch=trained.optim.batch,
        seed=trained.numerics.seed,
        device=place.device,
        dtype=autocast_type(trained.numerics.precision, place.device),
        store=recorded.images.store,
        bad=recorded.bad,
        window=recorded.images.window,
    )
    try:
        start.check_images(loader.images)
        method = build_method(trained.model, images=loader.images)
        step = TrainingStep(trained, method, place, steps_per_epoch=loader.steps)
        if said := step.prepare():
            yield said
        method.train()
        step.load(model=start.model, optimizer=start.optimizer, scaler=start.scaler)
        compared = _train(step, loader, start, lines, recorded)
    finally:
        loader.close()
    allowed = [tolerance(trained.numerics.precision, x.line.last - start.step) for x in compared]
    for one, most in zip(compared, allowed, strict=True):
        if not one.difference <= most:  # what is not a number is no loss
            raise FastSiamError(
                f"step {one.line.last:,} of {recorded.folder}: the log has loss "
                f"{one.line.loss:.6f}, and from {file} it becomes {one.loss:.6f}, further off than "
                f"rounding explains ({most:g}): other weights or steps led to that line"
            )
    worst, equal = max(one.difference for one in compared), sum(not x.difference for x in compared)
    yield (
        f"steps {start.step + 1:,} to {lines[-1].last:,} taken again from {file}: "
        f"{len(compared):,} of {len(compared):,} losses agree, {equal:,} to the last bit; the "
        f"largest difference is {worst:.2g} (at most {allowed[-1]:g} would pass for rounding)"
    )


def _beginning(recorded: Recorded, config: VerifyConfig) -> tuple[Path, Checkpoint, Sequence[Line]]:
    """Find a checkpoint that log lines come after, and those that are to be compared.

    Raises:
        CheckpointError: it cannot be read.
        FastSiamError: no line comes after it.
    """
    last = checkpoints.last(recorded.folder)
    for file in [Path(config.checkpoint)] if config.checkpoint else [last, *_beside(last)]:
        start = checkpoints.load(file)
        if lines := _following(recorded.lines, start.step, config.step):
            return file, start, lines
    wanted = f"step {config.step:,}" if config.step else "a log line"
    raise FastSiamError(
        f"{wanted} does not come after step {start.step:,}, where {file} is: there is nothing to "
        "replay; name an earlier checkpoint of the run, a copy that was kept, by --checkpoint FILE"
    )


def _beside(last: Path) -> list[Path]:
    """Return a run's other checkpoints, newest first."""
    others = [path for path in last.parent.glob("*.pt") if path != last]
    return sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)


def _following(lines: Sequence[Line], done: int, step: int) -> Sequence[Line]:
    """Return the lines after so many steps, up to the one of a step or for ``_STEPS`` steps."""
    after = [line for line in lines if line.last > done]
    if step:
        end = next((line.last for line in after if line.tells_of(step) and step > done), 0)
    else:
        end = max(done + _STEPS, after[0].last) if after else 0
    return [line for line in after if line.last <= end]


def _here(trained: TrainConfig, place: Place) -> TrainConfig:
    """Return the settings by which one process here takes the steps that a run's ranks took.

    Raises:
        DeviceError: it cannot.
    """
    optim, numerics, step = trained.optim, trained.numerics, trained.step
    ranks = trained.run.gpus * trained.run.max_nodes
    if place.device.type == "cpu":
        if numerics.precision == "fp16":
            raise DeviceError("the run was trained in fp16, which needs a GPU to be replayed")
        step = replace(step, cuda_graphs=False)
    if ranks > 1 and optim.accumulate > 1:
        raise DeviceError(
            f"--replay takes a batch in one process, where {ranks} ranks with --accumulate "
            f"{optim.accumulate} cut it in another way; without --replay its digests are verified"
        )
    joint = ranks if numerics.sync_bn else 1
    if numerics.sync_bn and numerics.sync_bn_ranks:
        joint = numerics.sync_bn_ranks
    if joint < ranks and not numerics.bn_images:
        images = optim.batch // ranks * joint
        numerics = replace(numerics, sync_bn=False, sync_bn_ranks=0, bn_images=images)
    return replace(trained, numerics=numerics, step=step)


def _train(
    step: TrainingStep,
    loader: Loader,
    start: Checkpoint,
    lines: Sequence[Line],
    recorded: Recorded,
) -> list[_Compared]:
    """Take the steps from a checkpoint to the last of some lines; return the losses at each.

    Raises:
        FastSiamError: the digest of a line differs.
    """
    digest, done, end = DataDigest(start, world=1), start.step, lines[-1].last
    wanted, compared = {line.last: line for line in lines}, []
    with tally("replaying steps", end - done) as progress:
        while done < end:
            epoch, skip = divmod(done, loader.steps)
            for batch in islice(loader.epoch(epoch, skip=skip), end - done):
                loss, _ = step(batch, at=done)
                done += 1
                digest.add(batch.seen)
                progress.add()
                if (line := wanted.get(done)) is None:
                    continue
                digest.share()
                told = digest.line(done)
                if told["since"] == line.first - 1:  # else from before there were digests
                    require_same(line, int(told["seen"], 16), recorded)
                compared.append(_Compared(line, loss.double().item()))
    return compared
