"""Threads for compiled work, which releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache

import torch

_MOST_THREADS = 1024  # threads start on demand


def in_threads(work: Callable[[], object], count: int) -> None:
    """Call ``work()`` in as many threads as torch uses, but at most ``count``.

    Each call must take pieces of work until all ``count`` pieces are taken. So the work is balanced
    without the GIL, which another thread may hold.

    Raises:
        Exception: the first exception of ``work``.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        work()
        return
    run_all(submit_all(_pool(os.getpid()), work, threads))


def submit_all(
    pool: ThreadPoolExecutor, work: Callable[[], object], count: int
) -> list[Future[object]]:
    """Start ``count`` calls of ``work()`` in a pool's threads."""
    return [pool.submit(work) for _ in range(count)]


def run_all(futures: Sequence[Future[object]]) -> None:
    """Wait until all calls have ended, even after an exception: the caller may then free memory.

    Raises:
        Exception: the exception of the first call that failed.
    """
    stopped = wait_all(futures)
    if stopped is not None:
        raise stopped
    for future in futures:
        future.result()


def wait_all(futures: Sequence[Future[object]]) -> BaseException | None:
    """Wait until all calls have ended; return an exception that interrupted it, such as Ctrl-C."""
    stopped: BaseException | None = None
    while running := [future for future in futures if not future.done()]:
        try:
            wait(running)
        except BaseException as error:  # keep waiting, even if Ctrl-C is pressed again
            stopped = error
    return stopped


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's thread pool; forked processes do not inherit threads."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="fastsiam")
