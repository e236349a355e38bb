"""Compiled work in threads: numba's functions let go of the interpreter while they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch

_TASKS_PER_THREAD = 4  # images differ in the work that they make


def in_threads(work: Callable[[int, int], object], count: int) -> None:
    """Call ``work(first, last)`` for stretches that cover range(count), in torch's many threads.

    Raises:
        Exception: whatever ``work`` raised first.
    """
    threads = torch.get_num_threads()
    parts = min(count, threads * _TASKS_PER_THREAD)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    stretches = pairwise(bounds)
    if threads == 1:
        for first, last in stretches:
            work(first, last)
        return
    for done in [_pool(os.getpid(), threads).submit(work, *stretch) for stretch in stretches]:
        done.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return this process's threads: a forked one does not inherit its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="fastsiam")
