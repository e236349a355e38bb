"""Set-up of a launcher's child processes: they end with it, and prefix stderr with their rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from fastsiam.signals import die_with_parent

LAUNCHER = "FASTSIAM_LAUNCHER"
"""Environment variable with the process ID of fastsiam's launcher, for its ranks."""


def is_worker() -> bool:
    """Return whether a launcher (fastsiam's or torchrun) started this process."""
    return "LOCAL_RANK" in os.environ


def begin() -> None:
    """Set up this process if it is a rank; call this first.

    If the launcher is killed, the rank gets SIGTERM, saves its state and exits. All ranks except
    rank 0 prefix the lines of stderr with their rank.
    """
    if not is_worker():
        return
    die_with_parent(int(os.environ.get(LAUNCHER) or os.getppid()))()
    if (rank := os.environ.get("RANK", "0")) != "0":
        sys.stderr = _PrefixedStream(sys.stderr, f"[rank {rank}] ")


class _PrefixedStream(io.TextIOBase):
    """A stream that prefixes each line and writes only complete lines."""

    def __init__(self, to: Any, name: str) -> None:
        self._to, self._name, self._partial = to, name, ""

    def write(self, text: str) -> int:
        """Write the complete lines; buffer the rest until its line ends."""
        *lines, self._partial = (self._partial + text).split("\n")
        if lines:
            self._to.write("".join(f"{self._name}{line}\n" for line in lines))
            self._to.flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete last line too, because a process flushes when it exits."""
        with contextlib.suppress(ValueError):  # closed during interpreter shutdown
            if self._partial:
                self._to.write(f"{self._name}{self._partial}\n")
                self._partial = ""
            self._to.flush()

    def fileno(self) -> int:
        return int(self._to.fileno())

    def writable(self) -> bool:
        return True
