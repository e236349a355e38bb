"""A process that another one started: it ends with it, and as a rank its lines bear its number."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

LAUNCHER = "FASTSIAM_LAUNCHER"
"""The variable in which our launcher's ranks find its process number."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): which signal this process gets when the thread that started it ends."""


def is_worker() -> bool:
    """Tell whether a launcher of ranks (ours, torchrun) started this process."""
    return "LOCAL_RANK" in os.environ


def begin() -> None:
    """Do what a rank does before anything else; nothing in a process that is none.

    A rank whose launcher is killed gets SIGTERM: it saves and leaves. Whoever reads the lines of
    several ranks in one stream sees whose they are; those of the first are as they ever were.
    """
    if not is_worker():
        return
    ending_with(int(os.environ.get(LAUNCHER) or os.getppid()))()
    if (rank := os.environ.get("RANK", "0")) != "0":
        sys.stderr = _Named(sys.stderr, f"[rank {rank}] ")


def ending_with(parent: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return what a new process does to get a signal when the thread that started it ends.

    It may be called between fork and exec, where little is safe: all it needs is loaded before.

    Args:
        parent: the number of the process that starts it. If that is gone already by the time of
            the call, the signal comes at once.
        number: the signal.
    """
    if sys.platform != "linux":  # no other system has it
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return ask


class _Named(io.TextIOBase):
    """A stream each of whose lines begins with a name; a line is written whole.

    Args:
        to: where the lines go.
        name: what they begin with.
    """

    def __init__(self, to: Any, name: str) -> None:
        self._to, self._name, self._begun = to, name, ""

    def write(self, text: str) -> int:
        """Write the lines that are whole by now; the rest waits for its end."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._to.write("".join(f"{self._name}{line}\n" for line in lines))
            self._to.flush()
        return len(text)

    def flush(self) -> None:
        """Write out what was begun too: a process that leaves flushes."""
        with contextlib.suppress(ValueError):  # closed, on the interpreter's way out
            if self._begun:
                self._to.write(f"{self._name}{self._begun}\n")
                self._begun = ""
            self._to.flush()

    def fileno(self) -> int:
        """Return the stream's file."""
        return int(self._to.fileno())

    def writable(self) -> bool:
        """Say that it can be written."""
        return True
