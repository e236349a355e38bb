"""Cases of a target, done by processes of their own with limits of time and memory.

A case is a function of the target, the seed and its number: what was found can be had again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError
from tests.fuzz.mutate import damaged
from tests.fuzz.targets import Target

SECONDS = 20
"""That a case may take; it takes some milliseconds on a machine with nothing else to do."""
MEGABYTES = 768
"""By which the process may grow in a case, of files of 1 MB at most."""
_BATCH = 500
"""Cases of a process."""
_PLACE = struct.Struct("q")
_CHANGES = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
    "socket.connect", "shutil.rmtree",
}  # fmt: skip
"""What no reader does."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that went wrong."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"case {self.number}: {self.what}"


class Forbidden(BaseException):
    """A reader did what none may do."""


def case(corpus: Sequence[bytes], target: Target, seed: int, number: int) -> bytes:
    """Return the damaged file of a case."""
    chance = random.Random(f"{seed} {number}")
    return target.wrap(damaged(corpus, chance))


def fuzz(
    target: Target, *, seed: int, first: int, count: int, seconds: float = math.inf
) -> tuple[int, list[Finding]]:
    """Do some cases of a target.

    Args:
        target: what reads.
        seed: of the cases.
        first: number of the first.
        count: how many.
        seconds: after which no other process begins its cases.

    Returns:
        How many were done, and those that went wrong.
    """
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        made, work = Path(name, "made"), Path(name, "work")
        made.mkdir()
        corpus, beside = target.corpus(made), target.beside(made)
        assert corpus
        number, end, until = first, first + count, time.monotonic() + seconds
        while number < end and time.monotonic() < until:
            last = min(number + _BATCH, end)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            done, found = _in_child(target, corpus, beside, work, seed, range(number, last))
            findings += found
            number = done
    return number - first, findings


def _in_child(
    target: Target,
    corpus: Sequence[bytes],
    beside: dict[str, bytes],
    work: Path,
    seed: int,
    numbers: range,
) -> tuple[int, list[Finding]]:
    """Do cases in a process; return the number of the one that is next, and what was found."""
    report = work.parent / "report"
    report.unlink(missing_ok=True)
    place = mmap.mmap(-1, _PLACE.size)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _do(target, corpus, beside, work, seed, numbers, place, report)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    at = _PLACE.unpack(place[:])[0]
    found = [
        Finding(int(number), what)
        for number, _, what in (line.partition(" ") for line in _lines(report))
    ]
    if status == 0:
        return numbers.stop, found
    how = (
        f"took longer than {SECONDS} s"
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        else f"ended the process ({signal.Signals(os.WTERMSIG(status)).name})"
        if os.WIFSIGNALED(status)
        else f"left the process ({os.WEXITSTATUS(status)})"
    )
    return at + 1, [*found, Finding(at, how)]


def _lines(report: Path) -> list[str]:
    return report.read_text().splitlines() if report.exists() else []


def _do(
    target: Target,
    corpus: Sequence[bytes],
    beside: dict[str, bytes],
    work: Path,
    seed: int,
    numbers: range,
    place: mmap.mmap,
    report: Path,
) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.disable()  # pytest's; the parent says which case ended its process
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    warnings.simplefilter("ignore")
    allowed = [str(work)]
    log = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    watching = [False]
    sys.addaudithook(lambda event, given: _watch(event, given, allowed) if watching[0] else None)
    _limit_memory()
    folder = work / "case"
    for number in numbers:
        place[:] = _PLACE.pack(number)
        content = case(corpus, target, seed, number)
        for name, whole in {**beside, target.place: content}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(whole)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        watching[0] = True
        try:
            said = verdict_of(target, folder)
        finally:
            watching[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if said:
            os.write(log, f"{number} {said}\n".encode())
        shutil.rmtree(folder, ignore_errors=True)
    gc.collect()


def verdict_of(target: Target, folder: Path) -> str:
    """Read a case as the program does; return what is wrong with the outcome, or ""."""
    try:
        target.read(folder)
    except (FastSiamError, ValueError) as error:
        if not isinstance(error, FastSiamError) and not _is_of_settings(error):
            return _told(error)
        text = str(error)
        if not text or "\n" in text:
            return f"{type(error).__name__} is not one line: {text!r:.200}"
    except MemoryError:
        return f"takes more than {MEGABYTES} MB"
    except BaseException as error:
        if "memory" in str(error).lower() and "alloc" in str(error).lower():
            return f"takes more than {MEGABYTES} MB"
        return _told(error)
    return ""


def _is_of_settings(error: ValueError) -> bool:
    """Tell whether ``config`` itself raised it, whose errors are ``ValueError`` by contract."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error) is ValueError and "/fastsiam/config/" in frames[-1].filename


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/fastsiam/" in frame.filename] or frames
    at = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {at}: {' '.join(str(error).split())[:160]}"


def _watch(event: str, given: tuple[Any, ...], allowed: Sequence[str]) -> None:
    """Refuse what changes anything outside of the case's folder."""
    if event == "open":
        path, _, flags = (*given, 0, 0)[:3]
        if not isinstance(flags, int) or not flags & _WRITING:
            return
    elif event in _CHANGES:
        path = given[0] if given else ""
    else:
        return
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    if not any(os.path.realpath(name).startswith(own) for own in (*allowed, "/dev/null")):
        raise Forbidden(f"{event} {name}")


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (MEGABYTES << 20),) * 2)


@contextlib.contextmanager
def lowest_priority() -> Iterator[None]:
    """Leave the cores to others while inside."""
    before = os.nice(0)
    os.nice(19 - before)
    yield
