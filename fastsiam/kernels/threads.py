"""Compiled work in threads: it lets go of the interpreter while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache

import torch

_MOST_THREADS = 1024  # they start when they are needed


def in_threads(work: Callable[[], object], count: int) -> None:
    """Call ``work()`` in as many threads as torch uses, but not in more than ``count``.

    Each call is to take pieces of work, of which there are ``count``, until none is left: so they
    are shared out while they are done, without the interpreter, which another thread may hold.

    Raises:
        Exception: whatever ``work`` raised first.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        work()
        return
    run_all([_pool(os.getpid()).submit(work) for _ in range(threads)])


def run_all(futures: Sequence[Future[object]]) -> None:
    """Wait until all have ended, whatever happens: what they work on may go away after that.

    Raises:
        Exception: whatever the first that failed raised.
    """
    stopped: BaseException | None = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:  # Ctrl-C, however often
            stopped = error
    if stopped is not None:
        raise stopped
    for future in futures:
        future.result()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads: a forked one does not inherit its parent's."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="fastsiam")
