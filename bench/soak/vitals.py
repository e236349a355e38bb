"""What a run holds of the machine: memory, descriptors, threads, and whether it grows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000
"""Samples of the bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What all processes of a run hold at a moment."""

    memory: float
    """MB in memory, with what several processes share counted once."""
    descriptors: float
    """Open files, pipes, sockets."""
    threads: float
    """Threads."""
    shared: float
    """MB of files in /dev/shm."""


NAMES = tuple(f.name for f in fields(Vitals))


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """By how much something grows in an hour."""

    slope: float
    """An hour's growth: the mean of the stretches' slopes, each weighed by what it tells."""
    low: float
    """Lower end of its 95% interval, by drawing stretches anew (bootstrap)."""
    high: float
    """Upper end."""
    level: float
    """Median of all samples."""
    stretches: int
    """Stretches of undisturbed work that were looked at."""
    samples: int
    """Looks in all of them."""

    @property
    def is_flat(self) -> bool:
        """Whether the interval has no growth in it, or none that matters: 1% in ten minutes."""
        return self.low <= 0 or self.slope <= 0.06 * self.level


def processes_of(mark: str) -> list[int]:
    """Return the processes whose environment has ``mark``, which they have from their parents."""
    wanted, found = mark.encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return sorted(found)


def look(processes: Sequence[int]) -> Vitals:
    """Add up what processes hold now; those that ended meanwhile hold nothing."""
    memory = descriptors = threads = 0
    for process in processes:
        folder = Path(f"/proc/{process}")
        with contextlib.suppress(OSError, ValueError):
            lines = (folder / "smaps_rollup").read_text().splitlines()
            kilobytes = next(line.split()[1] for line in lines if line.startswith("Pss:"))
            files, tasks = (len(os.listdir(folder / name)) for name in ("fd", "task"))
            memory, descriptors, threads = (
                memory + int(kilobytes), descriptors + files, threads + tasks,
            )  # fmt: skip
    return Vitals(
        memory=memory / 1000, descriptors=descriptors, threads=threads, shared=shared_bytes() / 1e6
    )


def shared_bytes() -> int:
    """Return the bytes of all files in /dev/shm."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir("/dev/shm"):
            with contextlib.suppress(OSError):
                total += entry.stat().st_size
    return total


def growth(stretches: Sequence[Sequence[tuple[float, Vitals]]], *, seed: int) -> dict[str, Growth]:
    """Find by how much each of the vitals grows, from stretches of work without a fault.

    Args:
        stretches: of each, its looks: the second, and what was seen.
        seed: of the draws.

    Returns:
        For each name of ``NAMES``; nothing if no stretch has three looks.
    """
    tables = [
        np.array([(at, *astuple(seen)) for at, seen in stretch])
        for stretch in stretches
        if len(stretch) >= 3
    ]
    if not tables:
        return {}
    weights, slopes = zip(*(_slopes(table) for table in tables), strict=True)
    weight, slope = np.array(weights), np.array(slopes)
    drawn = np.random.default_rng(seed).integers(len(tables), size=(_DRAWS, len(tables)))
    means = _mean(weight[drawn], slope[drawn])
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    middle, levels = _mean(weight, slope), np.median(np.concatenate(tables)[:, 1:], axis=0)
    return {
        name: Growth(
            slope=float(middle[i]),
            low=float(low[i]),
            high=float(high[i]),
            level=float(levels[i]),
            stretches=len(tables),
            samples=sum(map(len, tables)),
        )
        for i, name in enumerate(NAMES)
    }


def _slopes(table: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return how much a stretch tells, and the slopes of its least-squares lines in an hour."""
    at = table[:, 0] - table[:, 0].mean()
    spread = float((at**2).sum())
    return spread, 3600 * (at @ table[:, 1:]) / spread


def _mean(weight: NDArray[np.float64], slope: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weighted means over the last axis but one of ``slope``."""
    total: NDArray[np.float64] = (weight[..., None] * slope).sum(-2)
    mean: NDArray[np.float64] = total / weight.sum(-1)[..., None]
    return mean
