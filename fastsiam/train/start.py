"""Where a run starts: fresh weights, lent ones (``--init``), or a checkpoint (``--resume``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from fastsiam import distributed
from fastsiam.config import BackboneConfig, TrainConfig
from fastsiam.config.files import run_folder
from fastsiam.config.flags import BRANCH_SETTINGS, changes_text, differences
from fastsiam.console import rounded
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.files import quoted
from fastsiam.interchange import Pretrained, load_pretrained
from fastsiam.methods import Method, method_skeleton
from fastsiam.methods.optim import decaying_rate, longer
from fastsiam.model.numerics import with_settled_precision
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None
    """What it continues from, of the run's settings; None for a new run."""
    folder: Path | None
    """Folder of the run that continues: the run's own, or that of the run it branches off."""
    damaged: str
    """What there is to say of a damaged last checkpoint, or ""."""
    notes: tuple[str, ...]
    """What else there is to say."""


def start_of(config: TrainConfig, run: Path, place: Place) -> tuple[TrainConfig, Start]:
    """Find where a run starts, and resolve the settings that depend on it.

    Args:
        config: the run's settings.
        run: its folder.
        place: this rank; every rank calls it.

    Returns:
        The settings, with the precision resolved and extended as asked, and the start.

    Raises:
        CheckpointError: the run cannot continue, or not with these settings.
    """
    found, folder, damaged = _starting_point(config, run, place)
    began_with = None if found is None else found.config
    config = with_settled_precision(config, place.device, began_with=began_with)
    branches = folder is not None and folder.resolve() != run.resolve()
    start = _with_optimiser_of(config, found) if branches and found is not None else found
    config, start, said = _extended(config, start)
    if start is None or found is None:
        return config, Start(checkpoint=None, folder=None, damaged=damaged, notes=(said,))
    start.check_continues(config, advice=_advice(start.config, config, run, branches))
    if branches:
        start, said = _branched(found, start, config)
    return config, Start(checkpoint=start, folder=folder, damaged=damaged, notes=(said,))


def _with_optimiser_of(config: TrainConfig, start: Checkpoint) -> Checkpoint:
    """Return the start of a branch: the checkpoint with the optimiser settings of ``config``.

    If other settings differ too, it is returned as it is, to be refused.

    Raises:
        CheckpointError: the branch would end before it begins.
    """
    changed = differences(start.config, config)
    if not changed.keys() <= set(BRANCH_SETTINGS):
        return start
    if config.optim.epochs < start.epoch and "epochs" in changed:
        raise CheckpointError(
            f"the checkpoint is after epoch {rounded(start.epoch)}: a branch of it needs more than "
            f"--epochs {config.optim.epochs}"
        )
    own = replace(start.config, optim=config.optim, model=config.model)
    return replace(start, config=own)


def _advice(old: TrainConfig, new: TrainConfig, run: Path, branches: bool) -> str:
    """Say how to have the settings in which a run, or a new branch of it, cannot continue."""
    changed = differences(old, new).keys()
    path = quoted(run if new.run.resume in ("auto", "never") else new.run.resume)
    if changed & {f.name for f in fields(BackboneConfig)}:
        new_run = "leave out --resume" if branches else "another --out"
        return f"give the same ones, or {new_run} for a new run"
    if not changed <= set(BRANCH_SETTINGS):
        where = "instead of --resume" if branches else "with another --out"
        return f"give the same ones, or start a new run from the weights: --init {path} {where}"
    longer = new.optim.epochs > old.optim.epochs
    more = f"; --extend {new.optim.epochs} makes this run longer" if longer else ""
    return f"give the same ones, or branch off: --resume {path} with another --out{more}"


def _branched(found: Checkpoint, start: Checkpoint, config: TrainConfig) -> tuple[Checkpoint, str]:
    """Note in the start of a branch where it branched off, and what changed; say it, too.

    Args:
        found: the checkpoint, with the settings of the run that it is of.
        start: the same with the branch's settings.
        config: the branch's settings.
    """
    path = Path(config.run.resume)
    changed = differences(found.config, start.config)
    branch = {
        "run": str((run_folder(path) or path.parent).resolve()),
        "checkpoint": str(checkpoints.found(path).resolve()),
        "step": found.step,
        "epoch": found.epoch,
        "changed": {name: {"from": old, "to": new} for name, (old, new) in changed.items()},
    }
    said = f"branches off {path} after step {found.step:,} (epoch {rounded(found.epoch)})"
    if changed:
        now = decaying_rate(found.config.optim, max(0, found.step - 1), found.steps_per_epoch)
        then = decaying_rate(start.config.optim, found.step, found.steps_per_epoch)
        said += (
            f", {changes_text(changed, between=', ')}; "
            f"learning rate: {now:.3g} now, {then:.3g} at the next step"
        )
    return replace(start, branch=branch), said


def _starting_point(
    config: TrainConfig, run: Path, place: Place
) -> tuple[Checkpoint | None, Path | None, str]:
    """Find the checkpoint that ``--resume`` asks for: the same one on every rank, or an error.

    A branch that has begun continues with its own, as the same command run again expects.

    Returns:
        The checkpoint and the folder of its run, None and None for a new run; and what there is to
        say if the run's last checkpoint is damaged and it is the one before, else "".

    Raises:
        CheckpointError: there is none, it would overwrite a run, or the ranks find different ones.
    """
    start, damaged = checkpoints.load_newest(run)
    folder = run
    if config.run.resume == "never":
        refuse_existing_run(run)
    if _branches(config, run):
        path = Path(config.run.resume)
        given = checkpoints.load(path)
        if start is None:
            start, folder = given, run_folder(path) or path.parent
        elif start.step < given.step:
            raise CheckpointError(
                f"{run} holds a run already, after step {start.step:,}, and {path} is after step "
                f"{given.step:,}: continue the first by --resume {quoted(run)}, or choose another "
                "--out for a new branch of the second"
            )
    steps = torch.tensor([-1 if start is None else start.step], device=place.device)
    if distributed.gather(steps).unique().numel() > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints under {run}; all machines must share that folder"
        )
    return (None, None, "") if start is None else (start, folder, damaged)


def refuse_existing_run(run: Path) -> None:
    """Refuse a folder with a checkpoint, under ``--resume never``.

    Raises:
        CheckpointError: it has one.
    """
    if checkpoints.is_there(run):
        raise CheckpointError(
            f"--resume never: {run} holds a run already; choose another --out or delete it"
        )


def _branches(config: TrainConfig, run: Path) -> bool:
    """Tell whether ``--resume`` names a checkpoint that is not this run's own last one.

    Raises:
        CheckpointError: it names one that is not there.
    """
    if config.run.resume in ("auto", "never"):
        return False
    named = Path(config.run.resume)
    if named.resolve() == run.resolve() and checkpoints.is_there(run):
        return False
    return checkpoints.found(named).resolve() != checkpoints.last(run).resolve()


def _extended(
    config: TrainConfig, start: Checkpoint | None
) -> tuple[TrainConfig, Checkpoint | None, str]:
    """Give a run and its checkpoint the schedule that ``--extend`` asks for, and say what it is.

    It is the checkpoint's, made longer unless it is as long already: the same command continues
    an extended run like any other.

    Raises:
        CheckpointError: there is nothing to extend, or it cannot be.
    """
    epochs, schedule = config.run.extend, config.run.extend_schedule
    if not epochs:
        return config, start, ""
    if start is None:
        raise CheckpointError(
            f"--extend {epochs} makes a run longer that has begun, and there is none to continue "
            f"with: name it by --resume, or begin one with --epochs {epochs}"
        )
    optim, said = start.config.optim, ""
    if epochs < optim.epochs:
        raise CheckpointError(
            f"the run has {optim.epochs} epochs: give --extend more than these, not {epochs}"
        )
    if epochs > optim.epochs:
        try:
            optim, rates = longer(
                optim,
                epochs=epochs,
                schedule=schedule,
                step=start.step,
                steps_per_epoch=start.steps_per_epoch,
            )
        except ValueError as error:
            raise CheckpointError(f"--extend-schedule {schedule}: {error}") from error
        said = f"extended from {start.config.optim.epochs} to {epochs} epochs; {rates}"
    asked = max(config.optim.epochs, epochs)  # more than --extend is refused with the settings
    own = replace(config.optim, epochs=asked, restarts=optim.restarts)
    start = replace(start, config=replace(start.config, optim=optim))
    return replace(config, optim=own), start, said


def goes_on(config: TrainConfig) -> bool:
    """Tell whether ``--resume`` will find a checkpoint, so that ``--init`` counts no more."""
    if config.run.resume != "auto":
        return config.run.resume != "never"
    return bool(config.run.out) and checkpoints.is_there(Path(config.run.out))


def initial_weights(config: TrainConfig) -> tuple[Pretrained, tuple[str, ...]]:
    """Read what ``--init`` names; return it, and those of its parts that fit the settings.

    Raises:
        CheckpointError: the file cannot be read, or the backbone is another one.
    """
    name = "" if config.model.is_own else config.model.backbone
    pretrained = load_pretrained(Path(config.run.init), backbone=name)
    method = method_skeleton(config.model)
    expected = method.state_dict()
    fitting = tuple(
        part
        for part in method.parts
        if (shapes := _shapes(expected, part)) and _shapes(pretrained.state, part) == shapes
    )
    other_stem = pretrained.model.stem != config.model.stem and not pretrained.stem_assumed
    if "backbone" not in fitting or other_stem:
        raise CheckpointError(
            f"--init {quoted(config.run.init)} holds {pretrained.model.backbone} (stem "
            f"{pretrained.model.stem}, width {pretrained.model.width}), not the network that "
            "the settings name: give the same --backbone, --stem and --width"
        )
    return pretrained, fitting


def take_weights(method: Method, config: TrainConfig) -> str:
    """Start a method from the weights that ``--init`` names; say what was taken.

    Raises:
        CheckpointError: as ``initial_weights``.
    """
    pretrained, fitting = initial_weights(config)
    method.start_from(pretrained.part(*fitting))
    fresh = [part for part in method.parts if part not in fitting]
    return f"starts from {pretrained}" + (f"; fresh: {', '.join(fresh)}" if fresh else "")


def _shapes(state: Mapping[str, Tensor], part: str) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in state.items() if key.startswith(f"{part}.")}
