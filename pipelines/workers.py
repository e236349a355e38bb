"""Threads that work ahead of their caller, and how they end with the program."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

from fastsiam.kernels.cores import own_cores

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Made = TypeVar("Made")


def count(workers: int | str) -> int:
    """Return the number of workers to start with; -1 and "auto" mean one per core of this rank."""
    return workers if isinstance(workers, int) and workers >= 0 else own_cores()


class _Closes(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closes] = weakref.WeakSet()
"""Loaders, and generators of batches, that may have threads or processes."""
_inherited: list[_Closes] = []
"""Those that were open when this process was forked."""


def _keep_inherited() -> None:
    """Keep what a forked process inherits, also while it ends.

    The process lacks the threads, and would wait for them if a loader or a generator was deleted.
    """
    _inherited.extend(_open)
    _open.clear()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_inherited))


os.register_at_fork(after_in_child=_keep_inherited)


def close_at_exit(loader: _Closes) -> None:
    """Have a loader or a generator of batches closed when the program ends.

    Its processes and threads then end before multiprocessing would wait for them forever, and
    before the interpreter unloads the modules that they use.
    """
    _open.add(loader)
    atexit.unregister(_close_all)  # what is registered last runs first
    atexit.register(_close_all)


def _close_all() -> None:
    for loader in tuple(_open):
        try:
            loader.close()
        except Exception as error:  # the program is ending, perhaps because of the same error
            log.debug(f"closing a loader failed: {error}")


def made_ahead(
    make: Callable[[Task], Made], tasks: Iterable[Task], *, count: int, threads: int = 1
) -> Generator[Made]:
    """Yield ``make(task)`` for each task, in order; threads compute up to ``count`` ahead.

    The threads end when the generator ends or is closed. An error is raised where its result would
    be yielded.
    """
    rest = iter(tasks)
    with ThreadPoolExecutor(threads, "fastsiam-ahead") as pool:
        waiting = deque(pool.submit(make, task) for task in islice(rest, count))
        try:
            while waiting:
                made = waiting.popleft().result()
                waiting.extend(pool.submit(make, task) for task in islice(rest, 1))
                yield made
        finally:
            pool.shutdown(cancel_futures=True)
