"""What is done to a run: signals, kills, stops, a full disk, damaged files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastsiam import checkpoint as checkpoints
from fastsiam.bench.soak.subject import Subject
from fastsiam.config import Pipeline

_READ_FILES: tuple[Pipeline, ...] = ("torchvision", "dali")
"""Pipelines that read the images' own files in each epoch."""
_PATIENCE = 120.0
"""Seconds in which a run has to end, or to notice what was done to it, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that can happen to a run."""

    name: str
    does: Callable[[Subject, random.Random], None]
    """Does it, and puts right what has to be for the run to go on."""
    codes: tuple[int, ...]
    """Exit codes that it may end the run with."""
    needs: Callable[[Subject], bool] = lambda _: True
    """Tells whether it can be done to this run, here and now."""
    ends: bool = True
    """Whether the run has to end of it, if it does not end well just then."""


def _signal_to_all(number: int) -> Callable[[Subject, random.Random], None]:
    def do(run: Subject, _: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, number)

    return do


def _signal_to_launcher(number: int) -> Callable[[Subject, random.Random], None]:
    def do(run: Subject, _: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, number)

    return do


def _signal_to_one(number: int, kind: str) -> Callable[[Subject, random.Random], None]:
    def do(run: Subject, chance: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(chance.choice(run.children(kind)), number)

    return do


def _pause_one(run: Subject, chance: random.Random) -> None:
    """Have a rank stand still for some seconds, as on an overloaded machine."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        rank = chance.choice(run.children("rank"))
        os.kill(rank, signal.SIGSTOP)
        time.sleep(3)
        os.kill(rank, signal.SIGCONT)


def _damage_checkpoint(run: Subject, chance: random.Random) -> None:
    """Kill all of it, and flip a bit of its last checkpoint."""
    run.kill()
    run.wait(_PATIENCE)
    path = checkpoints.last(run.out)
    if checkpoints.previous(run.out).is_file() and path.is_file():
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content) // 4, len(content) // 2)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def _fill_disk(run: Subject, _: random.Random) -> None:
    """Fill the disk that the run is on for some seconds."""
    filler = run.out.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(5)
    filler.unlink()


def _damage_image(run: Subject, chance: random.Random) -> None:
    """Cut an image off until the run has met it and ended; then it is as it was."""
    path = chance.choice(sorted((run.plan.data / "train").rglob("*.jpg")))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    try:
        run.wait(_PATIENCE)
    finally:
        path.write_bytes(whole)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Give a folder a disk in memory of its own while inside; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _has(kind: str) -> Callable[[Subject], bool]:
    return lambda run: bool(run.children(kind))


_KILLED = 128 + signal.SIGKILL
FAULTS = (
    Fault("SIGTERM to all processes", _signal_to_all(signal.SIGTERM), (128 + signal.SIGTERM,)),
    Fault("SIGTERM to the launcher", _signal_to_launcher(signal.SIGTERM), (128 + signal.SIGTERM,)),
    Fault("Ctrl-C", _signal_to_all(signal.SIGINT), (128 + signal.SIGINT,)),
    Fault(
        "SIGUSR1 to a rank",
        _signal_to_one(signal.SIGUSR1, "rank"),
        (128 + signal.SIGUSR1,),
        _has("rank"),
    ),
    Fault("kill -9 of a rank", _signal_to_one(signal.SIGKILL, "rank"), (_KILLED,), _has("rank")),
    Fault("kill -9 of the launcher", _signal_to_launcher(signal.SIGKILL), (_KILLED,)),
    Fault("kill -9 of all", _signal_to_all(signal.SIGKILL), (_KILLED,)),
    Fault(
        "kill -9 of a loader's worker",
        _signal_to_one(signal.SIGKILL, "worker"),
        (1,),
        _has("worker"),
    ),
    Fault("a rank stands still", _pause_one, (), _has("rank"), ends=False),
    Fault("a damaged checkpoint", _damage_checkpoint, (_KILLED,)),
    Fault(
        "a full disk",
        _fill_disk,
        (1,),  # if the run ends just then, it cannot save
        lambda run: run.is_training and os.path.ismount(run.out.parent),
        ends=False,
    ),
    Fault(
        "a damaged image, repaired",
        _damage_image,
        (1,),
        lambda run: run.is_training and run.plan.pipeline in _READ_FILES,
    ),
)
