"""Work shared among forked processes that leave no trace behind, whatever ends them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from fastsiam.errors import DataError
from fastsiam.kernels.cores import cores

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5


class AbandonedError(Exception):
    """A task was given up because another failed; that one's error is the cause."""


@contextlib.contextmanager
def forked(
    workers: int, begin: Callable[..., None], *arguments: Any
) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]]:
    """Yield run(function, tasks), which yields results as they come, few tasks ahead.

    Args:
        workers: processes; -1 is one for each core. They take the tasks in their order.
        begin: called in each process first.
        arguments: what ``begin`` is called with; the processes are forked, so nothing is copied.

    Raises:
        DataError: a process was killed.
    """
    workers = workers if workers > 0 else cores()
    pool = ProcessPoolExecutor(
        workers,
        get_context("fork"),  # light: what is shared stays where it is
        initializer=_enter,
        initargs=(os.getpid(), begin, arguments),
    )

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: set[Future[Any]] = set()
        rest = iter(tasks)
        while True:
            for task in rest:
                waiting.add(pool.submit(function, task))
                if len(waiting) >= 2 * workers + 2:
                    break
            if not waiting:
                return
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                if not isinstance(future.exception(), AbandonedError):
                    yield future.result()

    try:
        yield run
    except BrokenProcessPool as error:
        raise DataError(
            "a process was killed at its work (for want of memory?): "
            "the same command goes on from here, and --workers takes fewer"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole group; the parent still needs its results.

    After SIGTERM a worker goes on for a few seconds, and then it ends: it may be the parent's
    multiprocessing that sent it, which waits for the worker before the parent exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))


def _enter(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    leave_signals_to_the_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
        if os.getppid() != parent:
            os._exit(1)
    gc.disable()  # nothing here makes cycles
    begin(*arguments)
