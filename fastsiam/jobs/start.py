"""Where a run starts: fresh weights, lent ones (``--init``), or a checkpoint (``--resume``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastsiam import checkpoint as checkpoints
from fastsiam import distributed
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.config.files import run_folder
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.files import quoted
from fastsiam.interchange import Pretrained, load_pretrained
from fastsiam.methods import Method, method_skeleton
from fastsiam.training.optim import longer


def starting_point(
    config: TrainConfig, run: Path, place: Place
) -> tuple[Checkpoint | None, Path | None, str]:
    """Find the checkpoint that ``--resume`` asks for: the same one on every rank, or an error.

    A branch that has begun goes on with its own, as the same command run again expects.

    Returns:
        The checkpoint and the folder of its run, None and None for a new run; and what there is to
        say if the run's last checkpoint is damaged and it is the one before, else "".

    Raises:
        CheckpointError: there is none, it would overwrite a run, or the ranks find different ones.
    """
    start, damaged = checkpoints.load_newest(run)
    folder = run
    if config.run.resume == "never" and start is not None:
        raise CheckpointError(
            f"--resume never: {run} holds a run already; choose another --out or delete it"
        )
    if _branches(config, run):
        path = Path(config.run.resume)
        given = checkpoints.load(path)
        if start is None:
            start, folder = given, run_folder(path) or path.parent
        elif start.step < given.step:
            raise CheckpointError(
                f"{run} holds a run already, after step {start.step:,}, and {path} is after step "
                f"{given.step:,}: go on with the one by --resume {quoted(run)}, or choose another "
                "--out for a new branch of the other"
            )
    steps = torch.tensor([-1 if start is None else start.step], device=place.device)
    if distributed.gather(steps).unique().numel() > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints under {run}; all machines must share that folder"
        )
    return (None, None, "") if start is None else (start, folder, damaged)


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


def extended(
    config: TrainConfig, start: Checkpoint | None
) -> tuple[TrainConfig, Checkpoint | None, str]:
    """Give a run and its checkpoint the schedule that ``--extend`` asks for, and say what it is.

    It is the checkpoint's, made longer unless it is as long already: the same command goes on with
    an extended run as with any other.

    Raises:
        CheckpointError: there is nothing to extend, or it cannot be.
    """
    epochs, schedule = config.run.extend, config.run.extend_schedule
    if not epochs:
        return config, start, ""
    if start is None:
        raise CheckpointError(
            f"--extend {epochs} makes a run longer that has begun, and there is none to go on "
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
