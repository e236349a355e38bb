"""Run the cases of a target in separate processes with limits of time and memory.

A case depends only on the target, the seed and its number, so every finding is reproducible.
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
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError
from fastsiam.kernels.library import jpeg
from tests.fuzz.mutate import corrupt
from tests.fuzz.targets import TARGETS, Target

SECONDS = 20
"""Time limit of a case in seconds. On an idle machine a case takes milliseconds."""
MEGABYTES = 768
"""Limit in MB for the memory growth of a case. Files have at most 1 MB."""
_BATCH = 500
"""Cases per process."""
_CHANGES = {
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
    "socket.connect", "shutil.rmtree",
}  # fmt: skip
"""Audit events that no reader may cause outside of its folder."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Forbidden(BaseException):
    """A reader did something that readers must not do."""


class Cases:
    """Cases of a target: a folder of valid files, one of which is corrupted in each case."""

    def __init__(self, target: Target, folder: Path, *, seed: int = 0) -> None:
        self._target, self._folder, self._seed = target, folder, seed
        self._made = folder / "made"
        self._made.mkdir()
        jpeg()  # its first use creates a folder, which readers must not do
        content, place = target.write(self._made), self._made / target.place
        self._whole = place.read_bytes() if place.exists() else b""
        self._corpus: Sequence[bytes] = content if isinstance(content, list) else [self._whole]

    def put(self, content: bytes) -> Path:
        """Write a case's folder with this content in the corrupted file."""
        case = self._folder / "case"
        shutil.copytree(self._made, case)
        path = case / self._target.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._target.wrap(content, self._whole))
        return case

    def read_whole(self) -> None:
        """Read a case in which nothing is corrupted."""
        self._target.read(self.put(self._corpus[0]))

    def run(self, numbers: range) -> dict[int, str]:
        """Run cases in a child process, restarted after each crash; return failures by number."""
        failures: dict[int, str] = {}
        while numbers:
            report = self._folder / "report"
            report.write_text("")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    self._run(numbers, report)
                    status = 0
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            at = numbers.stop
            for number, _, failure in (x.partition(" ") for x in report.read_text().splitlines()):
                at = int(number)
                failures |= {at: failure} if failure else {}
            if status:
                failures[at] = f"left the process ({os.waitstatus_to_exitcode(status)})"
                if os.WIFSIGNALED(status):
                    name = signal.Signals(os.WTERMSIG(status)).name
                    late = name == "SIGALRM"
                    failures[at] = f"took longer than {SECONDS} s" if late else f"ended by {name}"
            shutil.rmtree(self._folder / "case", ignore_errors=True)
            numbers = numbers[numbers.index(at) + 1 :] if status else range(0)
        return failures

    def _run(self, numbers: range, report: Path) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.disable()  # pytest enabled it; the parent reports which case crashed
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        warnings.simplefilter("ignore")
        gc.freeze()  # so that the final collection covers only what the cases left
        log, watching, allowed = os.open(report, os.O_WRONLY), [False], str(self._folder / "case")
        sys.addaudithook(
            lambda event, arguments: _watch(event, arguments, allowed) if watching[0] else None
        )
        size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (size + (MEGABYTES << 20),) * 2)
        for number in numbers:
            os.write(log, f"{number}\n".encode())
            case = self.put(corrupt(self._corpus, random.Random(f"{self._seed} {number}")))
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            watching[0] = True
            try:
                verdict = verdict_of(self._target, case)
            finally:
                watching[0] = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            if verdict:
                os.write(log, f"{number} {verdict}\n".encode())
            shutil.rmtree(case)
        gc.collect()


def fuzz(target: str | Target, *, seed: int, first: int, count: int) -> dict[int, str]:
    """Run cases of a target, given as an object or by name; return failures by case number."""
    if isinstance(target, str):
        target = TARGETS[target]
    failures: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        cases, end = Cases(target, Path(name), seed=seed), first + count
        for start in range(first, end, _BATCH):
            failures |= cases.run(range(start, min(start + _BATCH, end)))
    return failures


def verdict_of(target: Target, folder: Path) -> str:
    """Read a case as the program does; return what is wrong with the outcome, or ""."""
    try:
        target.read(folder)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        of_config = type(error) is ValueError and "/fastsiam/config/" in frames[-1].filename
        text = str(error)
        if isinstance(error, FastSiamError) or of_config:  # configs raise ValueError by contract
            one_line = text and "\n" not in text
            return "" if one_line else f"{type(error).__name__} is not one line: {text!r:.200}"
        if isinstance(error, MemoryError) or ("memory" in text.lower() and "alloc" in text.lower()):
            return f"takes more than {MEGABYTES} MB"
        fastsiam_frames = [frame for frame in frames if "/fastsiam/" in frame.filename] or frames
        at = f"{Path(fastsiam_frames[-1].filename).name}:{fastsiam_frames[-1].lineno}"
        return f"{type(error).__name__} at {at}: {' '.join(text.split())[:160]}"
    return ""


def _watch(event: str, arguments: tuple[Any, ...], allowed: str) -> None:
    """Raise if a reader changes anything outside of the case's folder."""
    if event == "open":
        path, _, flags = (*arguments, 0, 0)[:3]
        if not isinstance(flags, int) or not flags & _WRITING:
            return
    elif event in _CHANGES:
        path = arguments[0] if arguments else ""
    else:
        return
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    if not os.path.realpath(name).startswith((allowed, "/dev/null")):
        raise Forbidden(f"{event} {name}")
