"""Timings of repeated work: median and spread."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

UNSTEADY = 0.15
"""A spread wider than this is marked: such a figure says little."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a piece of work."""

    wall: float
    """Seconds by the clock."""
    cpu: float
    """Seconds of processor time, child processes included."""
    host: int = 0
    """Bytes of memory that its processes hold after it, without what the system caches of files."""


@dataclass
class Timing:
    """Repeats of one piece of work."""

    samples: list[Sample] = field(default_factory=list)
    images: int = 0
    """Images that go through in each repeat."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was computed, where that is known only once it is built."""
    gpu: int = 0
    """GPU memory that its processes hold, CUDA contexts included."""

    @property
    def rate(self) -> float:
        """Images a second: the median's."""
        return self.images / self.median

    @property
    def wall(self) -> list[float]:
        """Seconds by the clock, of each repeat."""
        return [sample.wall for sample in self.samples]

    @property
    def median(self) -> float:
        """Median of the wall-clock seconds."""
        return statistics.median(self.wall)

    @property
    def cpu(self) -> float:
        """Median of the processor seconds."""
        return statistics.median(sample.cpu for sample in self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest and the slowest repeat, over the median."""
        return (max(self.wall) - min(self.wall)) / 2 / self.median

    @property
    def host(self) -> int:
        """Most bytes of memory after a repeat."""
        return max(sample.host for sample in self.samples)
