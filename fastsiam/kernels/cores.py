"""Cores: how many this process may use, alone or as one of several ranks."""

from __future__ import annotations

import os

SHARE = "FASTSIAM_CORES"
"""The variable in which a rank keeps how many cores are its own, once it knows where it stands."""


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_ranks() -> int:
    """Return how many ranks there are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share(ranks: int) -> int:
    """Return how many cores are each one's if so many ranks may use those of this process."""
    return max(1, cores() // ranks)


def own_cores() -> int:
    """Return how many cores are this rank's own: all of this process's if it is alone."""
    return int(os.environ.get(SHARE) or share(local_ranks()))
