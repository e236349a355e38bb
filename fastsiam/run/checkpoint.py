"""Checkpoints, written atomically and read without executing code.

A run's randomness is a pure function of (seed, epoch, image). So a checkpoint contains only the
weights, the optimizer and the number of steps, without the state of generators or loaders.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastsiam
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.errors import CheckpointError, DamagedError, DataError, lacks_memory
from fastsiam.files import (
    atomic_write,
    is_file,
    os_errors_as,
    quote,
    reason,
    require_local,
)

FORMAT = 2
"""Version of the file format; fastsiam 0.1 wrote version 1."""
_FOLDER = 0x10
"""MS-DOS attribute of a folder in a zip file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a run after a step."""

    config: TrainConfig
    step: int
    """Number of completed optimizer steps."""
    seconds: float
    """Training time so far, without evaluation and saving."""
    images: int
    """Number of images in the data set."""
    steps_per_epoch: int
    """Optimizer steps in an epoch."""
    model: dict[str, Any]
    """State of the method, without DDP's prefix."""
    optimizer: dict[str, Any]
    """State of the optimizer."""
    scaler: dict[str, Any]
    """Gradient scaler state; empty unless precision is fp16."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Digest of images and augmentations since the last log line (``fastsiam.train.metrics``);
    empty in files of older versions."""
    model_hash: str = ""
    """``weights_hash`` of ``model``, computed by ``save``; empty in files of older versions."""
    branch: dict[str, Any] = field(default_factory=dict)
    """Record of where the run branched off, as in config.json (``fastsiam.train.start``); empty if
    it is not a branch."""
    extensions: list[dict[str, Any]] = field(default_factory=list)
    """Step, epoch and numbers of epochs of each ``--extend``, as in config.json."""

    @property
    def epoch(self) -> float:
        """Completed epochs."""
        return self.step / self.steps_per_epoch


def last(run: Path) -> Path:
    """Return the path of a run's last checkpoint."""
    return run / "checkpoints" / "last.pt"


def previous(run: Path) -> Path:
    """Return the path of a run's second-to-last checkpoint."""
    return last(run).with_name("previous.pt")


def exists(run: Path) -> bool:
    """Return whether a run has saved a checkpoint.

    Raises:
        CheckpointError: its folder cannot be read.
    """
    with os_errors_as(CheckpointError, f"cannot read {run}"):
        has_checkpoint = is_file(last(run)) or is_file(previous(run))
    return has_checkpoint


def save(path: Path, checkpoint: Checkpoint, *, keep: Path | None = None) -> None:
    """Write a checkpoint atomically; an existing file is moved to ``keep``.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; an existing file is
            unchanged.
    """
    state = {name: getattr(checkpoint, name) for name in Checkpoint.__slots__}
    state |= {
        "format": FORMAT,
        "fastsiam": fastsiam.__version__,
        "config": checkpoint.config.to_dict(),
        "model_hash": weights_hash(checkpoint.model),
    }
    try:
        with atomic_write(path) as temporary:
            torch.save(state, temporary)
            if keep is not None:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())  # before the existing file is renamed
                _keep(path, keep)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot save {path}: {reason(error)}") from error


def _keep(path: Path, other: Path) -> None:
    """Hard-link a file to a second name; at any time one of the two names is a complete file.

    On file systems without hard links the file is renamed. If ``path`` is a link to another disk,
    the file is copied.
    """
    path = path.resolve()
    if not is_file(path):
        return
    source = other.with_name(f"{other.name}.tmp")
    source.unlink(missing_ok=True)
    try:
        os.link(path, source)
    except OSError as error:
        if error.errno == errno.EXDEV:
            with atomic_write(other) as copy:
                shutil.copyfile(path, copy)
            return
        source = path
    os.replace(source, other)


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names and values of a state dict, in any order."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def locate(path: Path) -> Path:
    """Return the file of a checkpoint, given the file itself or a run's folder.

    Raises:
        CheckpointError: the file does not exist, or the folder cannot be read.
        FastSiamError: the path is a URL, or has a ``~`` that the shell did not expand.
    """
    require_local(path, reads=True)
    with os_errors_as(CheckpointError, f"cannot read {path}"):
        file = last(path) if path.is_dir() else path
        is_present = is_file(file)
    if not is_present and path.is_dir() and not (path / "config.json").is_file():
        advice = f"; pass {quote(path.parent)}" if (path / "last.pt").is_file() else ""
        raise CheckpointError(
            f"{path} is not a run folder: it has neither config.json nor {file.relative_to(path)}"
            f"{advice}"
        )
    if not is_present:
        advice = previous_hint(file)
        if not advice and file != path:
            advice = f"; start this run with --config {quote(path)} --out {quote(path)}"
        if weights := sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
            advice = f"; pass the file with weights, such as {weights[0]}"
        raise CheckpointError(f"no checkpoint at {file}{advice}")
    return file


def previous_hint(path: Path) -> str:
    """Return the end of an error message that names the previous checkpoint; "" without one."""
    previous_path = path.with_name("previous.pt")
    is_last = path.name == "last.pt" and previous_path.is_file()
    return f"; the previous checkpoint is {previous_path}" if is_last else ""


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert errors of reading a PyTorch file.

    Raises:
        DamagedError: the file is corrupt.
        CheckpointError: it cannot be read, or memory ran out; the file may be intact.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler and zipfile may raise anything on a corrupt file
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
        if lacks_memory(error):
            raise CheckpointError(f"cannot read {path}: out of memory") from error
        raise DamagedError(
            f"cannot read {path}: it is corrupt or not a PyTorch file of plain tensors"
            f"{previous_hint(path)}"
        ) from error


def load(path: Path, *, resumes: bool = False) -> Checkpoint:
    """Read a checkpoint with torch's restricted unpickler; all tensors are on the CPU.

    Args:
        path: a checkpoint, or a run's folder for its last one.
        resumes: whether the run will be resumed, which some runs of version 0.2 do not allow.

    Raises:
        CheckpointError: it is missing, corrupt, not a fastsiam checkpoint, or its run cannot be
            resumed.
    """
    path = locate(path)
    with read_errors(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
    checkpoint = parse(path, state)
    if resumes:
        _check_schedule(path.parent.parent, state["config"].get("optim", {}).get("restarts"))
    return checkpoint


def _check_schedule(run: Path, restarts: object) -> None:
    """Check that a run was not extended with a restarted cosine, which version 0.2 could do.

    Raises:
        CheckpointError: the run's learning rate follows such a schedule.
    """
    if restarts:
        raise CheckpointError(
            f"{run} was extended with --extend-schedule restart, which was removed after version "
            "0.2, so it cannot be resumed; to continue training with another learning rate, branch "
            f"off: --resume {quote(run)} --out OTHER --lr RATE"
        )


def load_newest(run: Path) -> tuple[Checkpoint | None, str]:
    """Read a run's last checkpoint, or the previous one if the last is corrupt or missing.

    Returns:
        The checkpoint, or None if the run has none; and a warning about the last one, or "".

    Raises:
        CheckpointError: the run has checkpoints, but none is readable, or it cannot be resumed.
    """
    path, previous_path = last(run), previous(run)
    if not exists(run):
        return None, ""
    with os_errors_as(CheckpointError, f"cannot read {path}"):
        fault = "corrupt" if is_file(path) else "missing"
    with contextlib.suppress(DataError):
        _check_schedule(run, RunSettings.read(run).restarts)
    try:
        return load(path, resumes=True), ""
    except CheckpointError as error:
        if fault == "corrupt" and not isinstance(error, DamagedError):
            raise
        try:
            checkpoint = load(previous_path, resumes=True)
        except CheckpointError:
            raise error from None
    return (
        checkpoint,
        f"{path} is {fault}: resuming from the previous checkpoint, at step {checkpoint.step:,}",
    )


def rename_corrupt(run: Path) -> None:
    """Rename a corrupt last checkpoint, so that the next save does not keep it as the previous one.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    path = last(run)
    with os_errors_as(CheckpointError, f"cannot rename {path}"):
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.damaged"))


def parse(path: Path, state: Any) -> Checkpoint:
    """Convert the unpickled content of a file to a checkpoint, and check the file's checksums.

    Raises:
        CheckpointError: it is corrupt, not a fastsiam checkpoint, or one of another version.
    """
    with read_errors(path), path.open("rb") as file:
        is_zip = file.read(2) == b"PK"  # torch can also read other files, without checksums
    if is_zip and not is_intact(path):
        raise DamagedError(
            f"cannot read {path}: it is corrupt (its content does not match its checksum)"
            f"{previous_hint(path)}"
        )
    content = state if isinstance(state, dict) else {}
    if {"fastsiam", "state_dict"} <= content.keys():  # as export writes them
        raise CheckpointError(
            f"{path} is a weight file, not a checkpoint: to start a new run from its weights, pass "
            f"--init {quote(path)} instead of --resume"
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version of fastsiam, or too old: only checkpoints "
            "of version 0.2 and newer can be read"
        )
    try:
        config = TrainConfig.from_dict(content["config"])
        fields = {name: content[name] for name in Checkpoint.__slots__ if name in content}
        return Checkpoint(**fields | {"config": config})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; was it written by another version of fastsiam?"
        ) from error


def is_intact(path: Path) -> bool:
    """Return whether a PyTorch file matches its CRC-32 checksums, which ``torch.load`` ignores.

    Raises:
        CheckpointError: it cannot be read.
    """
    with contextlib.suppress(DamagedError), read_errors(path), zipfile.ZipFile(path) as file:
        # torch leaves the memory of an entry uninitialised if this bit says it is a directory.
        has_folder = any(entry.external_attr & _FOLDER for entry in file.infolist())
        return not has_folder and file.testzip() is None
    return False
