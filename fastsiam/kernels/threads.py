"""Thread pool for compiled functions, which release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import lru_cache

import torch

_MOST_THREADS = 1024  # threads start on demand


def in_threads(work: Callable[[], object], count: int) -> None:
    """Call ``work()`` in as many threads as torch uses, but at most ``count``.

    Each call must take pieces of work until all ``count`` pieces are taken. This balances the load
    without the GIL, which another thread may hold.

    Raises:
        Exception: the first exception raised by ``work``.
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
    """Wait until all calls have ended, even if one fails, so that the caller may free their memory.

    Raises:
        BaseException: what interrupted the wait, such as Ctrl-C, or the first failed call's error.
    """
    interruption = wait_all(futures)
    if interruption is not None:
        raise interruption
    for future in futures:
        future.result()


def wait_all(futures: Sequence[Future[object]]) -> BaseException | None:
    """Wait until all calls have ended; return the exception that interrupted the wait, if any."""
    interruption: BaseException | None = None
    while running := [future for future in futures if not future.done()]:
        try:
            # Not concurrent.futures.wait: it misses that another thread shuts down the pool.
            running[0].exception()
        except CancelledError:
            continue
        except BaseException as error:  # keep waiting, even if Ctrl-C is pressed again
            interruption = error
    return interruption


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's thread pool; forked processes do not inherit threads."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="fastsiam")
