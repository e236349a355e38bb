"""Number of cores that this process may use, alone or as one of several ranks."""

from __future__ import annotations

import os

SHARE = "FASTSIAM_CORES"
"""Environment variable with the number of cores of this rank."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share(ranks: int) -> int:
    """Return the cores of each rank if this process's cores are divided among several ranks."""
    return max(1, cores() // ranks)


def own_cores() -> int:
    """Return the number of cores of this rank."""
    return int(os.environ.get(SHARE) or share(local_ranks()))
