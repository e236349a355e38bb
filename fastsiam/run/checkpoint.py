"""Checkpoints: written whole or not at all, read without executing anything.

A run's randomness is a pure function of (seed, epoch, image), so a checkpoint needs no generator
and no loader state: the weights, the optimizer and the number of steps done are everything.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastsiam
from fastsiam.config import TrainConfig
from fastsiam.config.flags import changes_text, differences
from fastsiam.errors import CheckpointError, DamagedError
from fastsiam.files import explained, lack_of_room, reason, written_whole

FORMAT = 2
"""Of what is written. 1 is version 0.1's, whose settings have another layout; it is read too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a run after a step."""

    config: TrainConfig
    step: int
    """Optimizer steps done."""
    seconds: float
    """Time spent on training so far, evaluation and saving left out."""
    images: int
    """Images in the data set."""
    steps_per_epoch: int
    """Optimizer steps in an epoch."""
    model: dict[str, Any]
    """State of the method, without the wrapper of several ranks."""
    optimizer: dict[str, Any]
    """State of the optimizer."""
    scaler: dict[str, Any]
    """Gradient scaler state; empty unless precision is fp16."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Digest of what was trained on since the last log line
    (``fastsiam.train.data_digest``); empty in files of versions that kept none."""
    weights: str = ""
    """Digest of ``model`` as it was saved (``digest_of``); empty in files of such versions."""
    branch: dict[str, Any] = field(default_factory=dict)
    """Where the run branched off another, as config.json has it (``fastsiam.train.start``);
    empty if it did not."""

    @property
    def epoch(self) -> float:
        """Epochs done."""
        return self.step / self.steps_per_epoch

    def check_continues(self, config: TrainConfig, *, advice: str = "give the same ones") -> None:
        """Refuse to continue as something else.

        Args:
            config: the settings to continue with.
            advice: what to do if they differ, for the message.

        Raises:
            CheckpointError: names the settings that differ.
        """
        if changed := differences(self.config, config):
            raise CheckpointError(
                "the checkpoint was trained with other settings "
                f"({changes_text(changed)}); {advice}"
            )

    def check_images(self, images: int) -> None:
        """Refuse to continue with more or fewer images, where no list tells which they were.

        Raises:
            CheckpointError: says how many there were and are.
        """
        if images != self.images:
            raise CheckpointError(
                f"the data changed: {images:,} images now, {self.images:,} when the run began, of "
                "which it keeps no list that --data-changed accept could go by; restore the data, "
                "or choose another --out for a new run"
            )


_LATER = ("seen", "weights", "branch")
"""Fields that files of earlier versions lack."""
KEPT = 2
"""Checkpoints that a run keeps: the last one and the one before; a save writes a third."""


def last(run: Path) -> Path:
    """Return where a run keeps its last checkpoint."""
    return run / "checkpoints" / "last.pt"


def previous(run: Path) -> Path:
    """Return where a run keeps the checkpoint before its last."""
    return last(run).with_name("previous.pt")


def is_there(run: Path) -> bool:
    """Tell whether a run has saved a checkpoint."""
    return last(run).is_file() or previous(run).is_file()


def save(path: Path, checkpoint: Checkpoint, *, keep: Path | None = None) -> None:
    """Write a checkpoint whole or not at all.

    Args:
        path: the file.
        checkpoint: its content.
        keep: where the file that is there so far goes.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the old file is
            untouched.
    """
    state = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
    state |= {
        "format": FORMAT,
        "fastsiam": fastsiam.__version__,
        "config": checkpoint.config.to_dict(),
        "weights": digest_of(checkpoint.model),
    }
    state["digest"] = digest_of(state)
    try:
        with written_whole(path) as temporary:
            torch.save(state, temporary)
            if keep is not None:
                _keep(path, keep)
    except (OSError, RuntimeError) as error:
        short = lack_of_room(error, path, _size(state))
        raise CheckpointError(f"cannot save {path}: {short or reason(error)}") from error


def _keep(path: Path, other: Path) -> None:
    """Give the file that is there a second name; at any moment one of the two is a whole file.

    Where a file system has no hard links, it gets the second name instead of the first.
    """
    path = path.resolve()
    if not path.is_file():
        return
    spare = other.with_name(f"{other.name}.tmp")
    spare.unlink(missing_ok=True)
    try:
        os.link(path, spare)
    except OSError:
        spare = path
    os.replace(spare, other)


def digest_of(state: Mapping[Any, Any]) -> str:
    """Return the SHA-256 of nested containers of tensors and plain values, in hex digits.

    Names, types, shapes, values and the order of lists count, that of dictionaries does not.
    """
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            digest.update(f"mapping {len(value)}:".encode())
            for name in sorted(value, key=repr):
                add(name)
                add(value[name])
        elif isinstance(value, list | tuple):
            digest.update(f"{type(value).__name__} {len(value)}:".encode())
            for part in value:
                add(part)
        else:
            digest.update(f"{type(value).__name__} {value!r};".encode())

    add(state)
    return digest.hexdigest()


def _size(state: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state
    return sum(map(_size, parts)) if isinstance(state, dict | list | tuple) else 0


def found(path: Path) -> Path:
    """Return the file of a checkpoint, or of the last one of a run's folder.

    Raises:
        CheckpointError: there is none, or its place cannot be looked at.
    """
    with explained(CheckpointError, f"cannot read {path}"):
        file = last(path) if path.is_dir() else path
        there = file.is_file()
    if not there and path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is no run's folder: it holds neither config.json nor {file.relative_to(path)}"
        )
    if not there:
        none_yet = "; this run has saved none yet: begin it with --out" if file != path else ""
        raise CheckpointError(f"no checkpoint at {file}{none_yet}")
    return file


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, tensors on the CPU, by torch's restricted unpickler.

    Args:
        path: a checkpoint, or a run's folder for its last one.

    Raises:
        CheckpointError: it is missing, damaged, or not one of ours.
    """
    path = found(path)
    before = path.with_name("previous.pt")
    is_last = path.name == "last.pt" and before.is_file()
    other = f"; the one before it is {before}" if is_last else ""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes the unpickler raise anything
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
        raise DamagedError(
            f"cannot read {path}: it is damaged or not a PyTorch file of plain tensors{other}"
        ) from error
    if _differs(state):
        raise DamagedError(
            f"cannot read {path}: it is damaged, it does not hold what was written{other}"
        )
    return parsed(path, state)


def _differs(state: Any) -> bool:
    """Tell whether a file of ours does not hold what was written; older ones have no digest."""
    if not isinstance(state, dict) or not isinstance(state.get("digest"), str):
        return False
    written = {name: value for name, value in state.items() if name != "digest"}
    try:
        return digest_of(written) != str(state["digest"])
    except RuntimeError:  # of what was never written: a list within itself, a tensor without bytes
        return True


def load_newest(run: Path) -> tuple[Checkpoint | None, str]:
    """Read a run's last checkpoint, or the one before where that is damaged or gone.

    Returns:
        None if the run has saved none; what there is to say of the last one, or "".

    Raises:
        CheckpointError: none of those that are there can be read.
    """
    path, before = last(run), previous(run)
    if not is_there(run):
        return None, ""
    try:
        return load(path), ""
    except CheckpointError as error:
        if path.is_file() and not isinstance(error, DamagedError):
            raise
        try:
            found = load(before)
        except CheckpointError:
            raise error from None
    what = "is damaged" if path.is_file() else "is gone"
    return found, f"{path} {what}: continuing from the one before it, after step {found.step:,}"


def put_aside(run: Path) -> None:
    """Rename a last checkpoint that cannot be read, so that no save takes it for a good one.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    path = last(run)
    with explained(CheckpointError, f"cannot rename {path}"):
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.damaged"))


def parsed(path: Path, state: Any) -> Checkpoint:
    """Return the checkpoint that a file's content is.

    Raises:
        CheckpointError: it is none of ours.
    """
    if not isinstance(state, dict) or state.get("format") not in (1, FORMAT):
        raise CheckpointError(f"{path} is not a checkpoint of this version of fastsiam")
    names = [name for name in Checkpoint.__slots__ if name != "config"]
    try:
        config = TrainConfig.from_dict(state["config"])
        return Checkpoint(
            **{name: state[name] for name in names if name in state or name not in _LATER},
            config=config,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is of another version of fastsiam: {error}") from error
