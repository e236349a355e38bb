"""Named time ranges for ``fastsiam bench profile``; they cost almost nothing otherwise.

torch's profiler does not see loader processes and threads, so each process writes its ranges to its
own file in the folder $FASTSIAM_TRACE.
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
    """Context manager that records the time range of a block: ``with span("decode"): ...``."""

    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _FOLDER:
            self._began = time.time_ns()

    def __exit__(self, *_: object) -> None:
        if _FOLDER:
            _note(self._name, self._began, time.time_ns(), threading.get_native_id())


def _note(name: str, began: int, ended: int, thread: int) -> None:
    """Write a range to the trace; times are nanoseconds since 1970, ``thread`` is a native ID."""
    process = os.getpid()
    if process not in _files:  # forked processes write to their own file
        path = Path(_FOLDER) / f"{process}.jsonl"
        _files[process] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    line = {"name": name, "began": began, "ended": ended, "process": process, "thread": thread}
    os.write(_files[process], (json.dumps(line) + "\n").encode())


def note_stages(names: tuple[str, ...], times: NDArray[np.int64], threads: NDArray[Any]) -> None:
    """Write the stages of N images, as timed by the compiled threads, to the trace.

    Args:
        names: names of the stages, in order.
        times: (N, stages + 1) start of each stage and end of the last one, in nanoseconds; 0 for
            stages that did not run.
        threads: (N,) native thread IDs.
    """
    if not _FOLDER:
        return
    for row, thread in zip(times.tolist(), threads.tolist(), strict=True):
        for name, began, ended in zip(names, row, row[1:], strict=False):
            if began and ended:
                _note(name, began, ended, thread)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the ranges of all processes in a trace folder."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
