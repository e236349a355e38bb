"""A process that another one started: it ends with it, and as a rank its lines bear its number."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from fastsiam.signals import ending_with

LAUNCHER = "FASTSIAM_LAUNCHER"
"""The variable in which our launcher's ranks find its process number."""


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
