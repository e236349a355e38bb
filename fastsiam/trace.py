"""Named ranges of time, for ``fastsiam bench profile``; else they cost next to nothing.

Processes and threads that load are out of sight for torch's profiler, so each process notes its
ranges in a file of its own, in the folder that $FASTSIAM_TRACE names.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FOLDER = os.environ.get("FASTSIAM_TRACE", "")
_files: dict[int, int] = {}


class span:
    """Times what is done inside: ``with span("decode"): ...``."""

    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _FOLDER:
            self._began = time.time_ns()

    def __exit__(self, *_: object) -> None:
        if _FOLDER:
            note(self._name, self._began, time.time_ns(), threading.get_native_id())


def note(name: str, began: int, ended: int, thread: int) -> None:
    """Write down a range, in nanoseconds since 1970."""
    if not _FOLDER:
        return
    process = os.getpid()
    if process not in _files:  # a forked one writes into a file of its own
        path = Path(_FOLDER) / f"{process}.jsonl"
        _files[process] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    line = {"name": name, "began": began, "ended": ended, "process": process, "thread": thread}
    os.write(_files[process], (json.dumps(line) + "\n").encode())


def note_stages(names: tuple[str, ...], times: NDArray[np.int64], threads: NDArray[Any]) -> None:
    """Write down what compiled threads did with each image.

    Args:
        names: of the stages, one after the other.
        times: (N, stages + 1) when each began, and the last one ended; 0 where there was none.
        threads: (N,) which thread it was.
    """
    if not _FOLDER:
        return
    for row, thread in zip(times.tolist(), threads.tolist(), strict=True):
        for name, began, ended in zip(names, row, row[1:], strict=False):
            if began and ended:
                note(name, began, ended, thread)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what all processes noted in a folder."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
