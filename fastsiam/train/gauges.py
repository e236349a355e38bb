"""Warnings about the machine: a full disk, little memory, a slower loader."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastsiam.console import Console, size
from fastsiam.environment import host_memory
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import MetricsLog

_WINDOW = 40
"""Number of log points whose median data wait is compared."""
_WAIT_GROWTH = 0.1
"""Increase of the data wait that triggers a warning, as a fraction of a step's time."""
_LOW_MEMORY = 0.05
"""Fraction of free host memory below which a warning is printed."""
_CHECKPOINTS = 2
"""Checkpoints that must fit on the disk: the oldest is deleted only after a new one is written."""


class MachineMonitor:
    """Checks of the machine at a run's log points, on rank 0; each problem is reported once."""

    def __init__(self, log: MetricsLog, *, console: Console) -> None:
        self._log, self._console = log, console
        self._usual_wait: float | None = None
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._warned: set[str] = set()

    def check(self, values: Mapping[str, Any]) -> None:
        """Run all checks at a log point; this takes a fraction of a millisecond."""
        warnings = {
            "disk": _disk_warning(self._log.path.parent),
            "memory": _memory_warning(),
            "data_wait": self._wait_warning(values["data_wait"]),
        }
        for name, text in warnings.items():
            if text and name not in self._warned:
                self._warned.add(name)
                position = {"step": values["step"], "epoch": values["epoch"]}
                self._log.write("alarm", {**position, "name": name, "text": text})
                self._console.warn(text)

    def _wait_warning(self, wait: float) -> str:
        self._waits.append(wait)
        if len(self._waits) < _WINDOW:
            return ""
        median = statistics.median(self._waits)
        if self._usual_wait is None:
            self._usual_wait = median
        if median - self._usual_wait < _WAIT_GROWTH:
            return ""
        return (
            f"data wait grew from {self._usual_wait:.0%} to {median:.0%} (medians of {_WINDOW} log "
            "points): the loader became slower"
        )


def _disk_warning(run: Path) -> str:
    last = checkpoints.last(run)
    with contextlib.suppress(OSError):  # no checkpoint yet
        checkpoint = last.stat().st_size
        free = shutil.disk_usage(last.parent).free
        if free < _CHECKPOINTS * checkpoint:
            return (
                f"the disk of {last.parent} has {size(free)} left; a checkpoint takes "
                f"{size(checkpoint)}, and the previous one is deleted only after the new one is "
                "written"
            )
    return ""


def _memory_warning() -> str:
    free, total = host_memory()
    if free >= _LOW_MEMORY * total:
        return ""
    return (
        f"the host has {size(free)} of {size(total)} memory left; when it runs out, the system "
        "kills processes: lower --workers or --prefetch, or stop other programs"
    )
