"""The start of a run: new weights, weights from ``--init``, or a checkpoint (``--resume``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fastsiam import distributed
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import run_folder
from fastsiam.config.train import BRANCH_SETTINGS, changes_text, differences
from fastsiam.console import format_number
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError
from fastsiam.files import quote
from fastsiam.interchange import Pretrained, load_pretrained
from fastsiam.methods import Method, method_skeleton
from fastsiam.methods.optim import decaying_rate
from fastsiam.model.numerics import with_resolved_precision
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The starting point of a run; the defaults describe a new run."""

    checkpoint: Checkpoint | None = None
    """Checkpoint to resume from, with the run's settings; None for a new run."""
    folder: Path | None = None
    """Folder of the run to resume: the run itself, or the run that it branches off."""
    damaged: str = ""
    """Warning about a corrupt last checkpoint, or ""."""
    note: str = ""
    """Another message for the user, or ""."""

    def is_branch(self, run: Path) -> bool:
        """Return whether the run in the folder ``run`` continues another run."""
        return self.folder is not None and self.folder.resolve() != run.resolve()


def start_of(config: TrainConfig, run: Path, place: Place) -> tuple[TrainConfig, Start]:
    """Find where a run starts, and resolve the settings that depend on it; every rank calls this.

    Returns:
        The settings, with the precision resolved and ``--extend`` applied, and the start.

    Raises:
        CheckpointError: the run cannot be resumed, or not with these settings.
    """
    start = find_start(config, run, restarts=distributed.is_worker())
    saved, folder = start.checkpoint, start.folder
    saved_config = None if saved is None else saved.config
    config = with_resolved_precision(config, place.device, began_with=saved_config)
    if saved is None or folder is None:
        if epochs := config.run.extend:
            raise CheckpointError(
                f"--extend {epochs} needs a run to extend: name one with --resume, or start a new "
                f"run with --epochs {epochs}"
            )
        return config, start
    checkpoint, is_branch = saved, start.is_branch(run)
    changed = differences(saved.config, config)
    if is_branch and changed.keys() <= set(BRANCH_SETTINGS):
        if "epochs" in changed and config.optim.epochs < saved.epoch:
            raise CheckpointError(
                f"--epochs {config.optim.epochs} is too short for this branch: its checkpoint is "
                f"after epoch {format_number(saved.epoch)}"
            )
        branch_config = replace(saved.config, optim=config.optim, model=config.model)
        checkpoint = replace(saved, config=branch_config)
    config, checkpoint, note = _apply_extend(config, checkpoint)
    _check_same_settings(config, checkpoint, run)
    if is_branch:
        checkpoint, note = _record_branch(saved, checkpoint, Path(config.run.resume))
    return config, replace(start, checkpoint=checkpoint, note=note)


def _check_same_settings(config: TrainConfig, start: Checkpoint, run: Path) -> None:
    """Check that a run can be resumed with these settings.

    Raises:
        CheckpointError: settings differ; names them and says how to use them.
    """
    changed = differences(start.config, config)
    if not changed:
        return
    source = run if config.run.resume in ("auto", "never") else Path(config.run.resume)
    path, folder = quote(source), run_folder(source)
    settings = "" if folder is None else f"--config {quote(folder)} "
    advice = f"or branch off with other optimizer settings (--resume {path} --out OTHER)"
    if not changed.keys() <= set(BRANCH_SETTINGS):
        advice = "or, with the same backbone, start a new run from its weights "
        advice += f"({settings}--init {path} --out OTHER)"
    elif "epochs" in changed:
        advice = f"train longer (--extend EPOCHS), {advice}"
    raise CheckpointError(
        f"the checkpoint was trained with other settings ({changes_text(changed)}); pass the same "
        f"values, {advice}"
    )


def _record_branch(original: Checkpoint, start: Checkpoint, path: Path) -> tuple[Checkpoint, str]:
    """Record where a branch starts and what changed; return its checkpoint and a message.

    ``start`` is the checkpoint at ``path``, which is ``original``, with the branch's settings.
    """
    changed = differences(original.config, start.config)
    branch = {
        "run": str((run_folder(path) or path.parent).resolve()),
        "checkpoint": str(checkpoints.locate(path).resolve()),
        "step": original.step,
        "epoch": original.epoch,
        "changed": {name: {"from": old, "to": new} for name, (old, new) in changed.items()},
    }
    message = (
        f"branches off {path} after step {original.step:,} (epoch {format_number(original.epoch)})"
    )
    if changed:
        message += f", {changes_text(changed, between=', ')}"
    current_lr = float(original.optimizer["param_groups"][0]["lr"])
    next_lr = decaying_rate(start.config.optim, original.step, original.steps_per_epoch)
    message += f"; learning rate: {current_lr:.3g} now, {next_lr:.3g} at the next step"
    return replace(start, branch=branch), message


def find_start(config: TrainConfig, run: Path, *, restarts: bool = False) -> Start:
    """Find the checkpoint that ``--resume`` asks for, which must be the same on every rank.

    A branch that already has its own checkpoint resumes from that one, so that users can run the
    same command again.

    Args:
        config: the run's settings.
        run: the run's folder.
        restarts: whether a launcher or a job may have restarted the run. A branch then resumes from
            its own checkpoint even if the original run is ahead of it.

    Raises:
        CheckpointError: the checkpoint is missing, the run would overwrite another run, or the
            ranks find different checkpoints.
    """
    start, warning = checkpoints.load_newest(run)
    folder = run
    if config.run.resume == "never":
        _check_no_existing_run(run)
    path = Path(config.run.resume)
    is_named = config.run.resume not in ("auto", "never")
    if start is not None and path.resolve() == run.resolve():
        is_named = False
    if is_named and checkpoints.locate(path).resolve() != checkpoints.last(run).resolve():
        requested, origin = checkpoints.load(path), run_folder(path) or path.parent
        is_same_run = origin.resolve() == run.resolve()
        if start is None:
            start, folder = requested, origin
        elif start.step > requested.step and is_same_run:
            raise CheckpointError(
                f"{path} is at step {requested.step:,}, but {run} is at step {start.step:,}; pass "
                f"--resume {quote(run)} to resume it there, or another --out to branch off"
            )
        else:
            conflict = ""
            if not is_same_run and not _is_branch_of(start, origin):
                conflict = f"that did not branch off {path}"
            elif start.step < requested.step and not restarts:
                conflict = f"at step {start.step:,}, before step {requested.step:,} of {path}"
            if conflict:
                raise CheckpointError(
                    f"{run} already contains a run {conflict}; pass --resume {quote(run)} to "
                    "resume that run, or choose another --out for a new branch"
                )
    steps = torch.tensor([-1 if start is None else start.step])
    if distributed.gather(steps).unique().numel() > 1:
        raise CheckpointError(
            f"the ranks find different checkpoints in {run}; put it on a disk that all machines "
            "share (--out)"
        )
    return Start() if start is None else Start(checkpoint=start, folder=folder, damaged=warning)


def _is_branch_of(checkpoint: Checkpoint, run: Path) -> bool:
    """Return whether a checkpoint is of a branch of ``run``, which may have been moved since."""
    recorded = checkpoint.branch.get("run")
    return recorded is not None and (Path(recorded) == run.resolve() or not Path(recorded).exists())


def _check_no_existing_run(run: Path) -> None:
    """Check that a folder has no checkpoint, for ``--resume never``.

    Raises:
        CheckpointError: the folder has one.
    """
    if checkpoints.exists(run):
        raise CheckpointError(
            f"--resume never: {run} already contains a run; pass --resume auto to resume it or to "
            "join its machines, or choose another --out"
        )


def _apply_extend(config: TrainConfig, start: Checkpoint) -> tuple[TrainConfig, Checkpoint, str]:
    """Apply ``--extend`` to the settings and the checkpoint.

    A checkpoint that already has the longer schedule is left unchanged, so that the same command
    resumes an extended run.

    Returns:
        The settings, the checkpoint, and a message about the new schedule, or "".

    Raises:
        CheckpointError: the run is already longer.
    """
    epochs = config.run.extend
    if not epochs:
        return config, start, ""
    optim = start.config.optim
    if epochs < optim.epochs:
        raise CheckpointError(
            f"--extend {epochs} is less than the run's {optim.epochs} epochs; pass a larger number"
        )
    # If --epochs exceeds --extend, a later check raises an error.
    total_epochs = max(config.optim.epochs, epochs)
    config = replace(config, optim=replace(config.optim, epochs=total_epochs))
    if epochs == optim.epochs:
        return config, start, ""
    extended_optim = replace(optim, epochs=epochs)
    extension = {"step": start.step, "epoch": start.epoch, "from": optim.epochs, "to": epochs}
    current_lr = decaying_rate(optim, max(0, start.step - 1), start.steps_per_epoch)
    next_lr = decaying_rate(extended_optim, start.step, start.steps_per_epoch)
    start = replace(
        start,
        config=replace(start.config, optim=extended_optim),
        extensions=[*start.extensions, extension],
    )
    message = (
        f"extended from {optim.epochs} to {epochs} epochs; learning rate: {current_lr:.3g} now, "
        f"{next_lr:.3g} at the next step: a cosine over all {epochs} epochs"
    )
    return config, start, message


def will_resume(config: TrainConfig) -> bool:
    """Return whether ``--resume`` will find a checkpoint, so that ``--init`` is ignored."""
    if config.run.resume != "auto":
        return config.run.resume != "never"
    return bool(config.run.out) and checkpoints.exists(Path(config.run.out))


def initial_weights(config: TrainConfig) -> tuple[Pretrained, tuple[str, ...]]:
    """Read the file that ``--init`` names.

    Returns:
        The weights, and the names of the parts (backbone, projector, ...) that fit the settings.

    Raises:
        CheckpointError: the file cannot be read, or has another backbone than the settings.
    """
    name = "" if config.model.is_own else config.model.backbone
    pretrained = load_pretrained(Path(config.run.init), backbone=name)
    method = method_skeleton(config.model)
    expected = method.state_dict()
    matching_parts = tuple(
        part
        for part in method.parts
        if (shapes := _shapes(expected, part)) and _shapes(pretrained.state, part) == shapes
    )
    other_stem = pretrained.model.stem != config.model.stem and not pretrained.stem_assumed
    if "backbone" not in matching_parts or other_stem:
        raise CheckpointError(
            f"--init {quote(config.run.init)} contains {pretrained.model.backbone} (stem "
            f"{pretrained.model.stem}, width {pretrained.model.width}), not the network of the "
            "settings; pass the same --backbone, --stem and --width"
        )
    return pretrained, matching_parts


def load_initial_weights(method: Method, config: TrainConfig) -> str:
    """Load the weights that ``--init`` names; return a message on what was loaded.

    Raises:
        CheckpointError: as ``initial_weights``.
    """
    pretrained, matching_parts = initial_weights(config)
    method.start_from(pretrained.part(*matching_parts))
    new_parts = [part for part in method.parts if part not in matching_parts]
    return f"starts from {pretrained}" + (
        f"; randomly initialised: {', '.join(new_parts)}" if new_parts else ""
    )


def _shapes(state: Mapping[str, Tensor], part: str) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in state.items() if key.startswith(f"{part}.")}
