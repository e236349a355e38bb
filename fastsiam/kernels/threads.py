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
    run_all(submit_all(_pool(os.getpid()), work, threads))


def submit_all(
    pool: ThreadPoolExecutor, work: Callable[[], object], count: int
) -> list[Future[object]]:
    """Start ``count`` calls of ``work()`` in a pool's threads: all of them, or none.

    If one cannot start, the calls that wait for a thread are cancelled and those that run are
    awaited before the exception leaves: the memory that they use may go away after that.

    Raises:
        RuntimeError: the system allows no further thread.
    """
    futures: list[Future[object]] = []
    try:
        for _ in range(count):
            # The pool's own future is unknown where ``submit`` queues a call and then raises.
            futures.append(Future())
            pool.submit(_run, futures[-1], work)
    except BaseException:
        for future in futures:
            future.cancel()
        wait_all(futures)
        raise
    return futures


def _run(future: Future[object], work: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def run_all(futures: Sequence[Future[object]]) -> None:
    """Wait until all have ended, whatever happens: what they work on may go away after that.

    Raises:
        Exception: whatever the first that failed raised.
    """
    stopped = wait_all(futures)
    if stopped is not None:
        raise stopped
    for future in futures:
        future.result()


def wait_all(futures: Sequence[Future[object]]) -> BaseException | None:
    """Wait until all have ended; return the exception that interrupted it, usually Ctrl-C."""
    stopped: BaseException | None = None
    while running := [future for future in futures if not future.done()]:
        try:
            wait(running)
        except BaseException as error:  # however often it is pressed
            stopped = error
    return stopped


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads: a forked one does not inherit its parent's."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="fastsiam")
