"""Checkpoints: written whole or not at all, read without executing anything.

A run's randomness is a pure function of (seed, epoch, image), so a checkpoint needs no generator
and no loader state: the weights, the optimizer and the number of steps done are everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fastsiam
from fastsiam.config import TrainConfig
from fastsiam.config.flags import differences
from fastsiam.errors import CheckpointError
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
    """State of the gradient scaler; empty but for fp16."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Digest of what was trained on since the last log line (``fastsiam.training.seen``); empty in
    files of versions that kept none."""
    weights: str = ""
    """Digest of ``model`` as it was saved (``digest_of``); empty in files of such versions."""

    @property
    def epoch(self) -> float:
        """Epochs done."""
        return self.step / self.steps_per_epoch

    def check_continues(self, config: TrainConfig) -> None:
        """Refuse to go on as something else.

        Raises:
            CheckpointError: names the settings that differ.
        """
        if changed := differences(self.config, config):
            longer = config.optim.epochs > self.config.optim.epochs
            more = f"; --extend {config.optim.epochs} makes this run longer" if longer else ""
            raise CheckpointError(
                f"the checkpoint was trained with other settings ({'; '.join(changed)}); "
                f"give the same ones, or another --out for a new run{more}"
            )

    def check_images(self, images: int) -> None:
        """Refuse to go on with more or fewer images, where no list tells which they were.

        Raises:
            CheckpointError: says how many there were and are.
        """
        if images != self.images:
            raise CheckpointError(
                f"the data changed: {images:,} images now, {self.images:,} when the run began, of "
                "which it keeps no list that --data-changed accept could go by; restore the data, "
                "or choose another --out for a new run"
            )


_LATER = ("seen", "weights")
"""Fields that files of earlier versions lack."""


def last(run: Path) -> Path:
    """Return where a run keeps its last checkpoint."""
    return run / "checkpoints" / "last.pt"


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint whole or not at all.

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
    try:
        with written_whole(path) as temporary:
            torch.save(state, temporary)
    except (OSError, RuntimeError) as error:
        short = lack_of_room(error, path, _size(state))
        raise CheckpointError(f"cannot save {path}: {short or reason(error)}") from error


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of tensors: SHA-256 over names, types, shapes and bytes, sorted by name.

    Args:
        state: of a method, as ``state_dict`` returns it; what is no tensor counts as its text.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r}\n".encode())
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous()
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
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
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes the unpickler raise anything
        raise CheckpointError(
            f"cannot read {path}: it is damaged or not a PyTorch file of plain tensors"
        ) from error
    return parsed(path, state)


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
