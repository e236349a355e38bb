"""Cases of a target, run in processes of their own with limits of time and memory.

A case is a function of the target, the seed and its number, so every finding can be reproduced.
"""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError
from fastsiam.kernels.library import jpeg
from tests.fuzz.mutate import damaged
from tests.fuzz.targets import TARGETS, Files, Target

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


def fuzz(target: str | Target, *, seed: int, first: int, count: int) -> list[Finding]:
    """Run cases of a target, or of the target of a name; return those that went wrong."""
    if isinstance(target, str):
        target = TARGETS[target]
    jpeg()  # a first use makes their folder, which no reader may do
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        made = Path(name, "made")
        made.mkdir()
        corpus, beside = target.corpus(made), target.beside(made)
        assert corpus
        number, end = first, first + count
        while number < end:
            work = Path(tempfile.mkdtemp(dir=name))
            cases = range(number, min(number + _BATCH, end))
            number, found = _in_child(target, corpus, beside, work, seed, cases)
            findings += found
    return findings


def _in_child(
    target: Target, corpus: Sequence[bytes], beside: Files, work: Path, seed: int, numbers: range
) -> tuple[int, list[Finding]]:
    """Run cases in a process; return the number of the next one, and what was found."""
    report = work.with_suffix(".report")
    report.touch()
    place = mmap.mmap(-1, _PLACE.size)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _run(target, corpus, beside, work, seed, numbers, place, report)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    at = _PLACE.unpack(place[:])[0]
    lines = (line.partition(" ") for line in report.read_text().splitlines())
    found = [Finding(int(number), what) for number, _, what in lines]
    if status == 0:
        return numbers.stop, found
    how = f"left the process ({os.waitstatus_to_exitcode(status)})"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        how = f"took longer than {SECONDS} s" if name == "SIGALRM" else f"ended by {name}"
    return at + 1, [*found, Finding(at, how)]


def _run(
    target: Target,
    corpus: Sequence[bytes],
    beside: Files,
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
    gc.freeze()  # the collection at the end is of what the cases left
    log = os.open(report, os.O_WRONLY | os.O_APPEND)
    watching = [False]
    sys.addaudithook(lambda event, given: _watch(event, given, str(work)) if watching[0] else None)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (MEGABYTES << 20),) * 2)
    folder = work / "case"
    for number in numbers:
        place[:] = _PLACE.pack(number)
        content = target.wrap(damaged(corpus, random.Random(f"{seed} {number}")))
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
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        of_config = type(error) is ValueError and "/fastsiam/config/" in frames[-1].filename
        text = str(error)
        if isinstance(error, FastSiamError) or of_config:  # its errors are ValueError by contract
            one_line = text and "\n" not in text
            return "" if one_line else f"{type(error).__name__} is not one line: {text!r:.200}"
        if isinstance(error, MemoryError) or ("memory" in text.lower() and "alloc" in text.lower()):
            return f"takes more than {MEGABYTES} MB"
        own = [frame for frame in frames if "/fastsiam/" in frame.filename] or frames
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return f"{type(error).__name__} at {at}: {' '.join(text.split())[:160]}"
    return ""


def _watch(event: str, given: tuple[Any, ...], allowed: str) -> None:
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
    if not os.path.realpath(name).startswith((allowed, "/dev/null")):
        raise Forbidden(f"{event} {name}")
