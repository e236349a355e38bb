"""Threads that make batches ahead, and what ends them with the program."""

from __future__ import annotations

import atexit
import logging
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


def count(workers: int) -> int:
    """Return the number of workers: for -1, the cores of this rank."""
    return workers if workers >= 0 else own_cores()


class _Closes(Protocol):
    def close(self) -> None: ...


Closes = TypeVar("Closes", bound=_Closes)


def closes_at_exit(loader: Closes) -> Closes:
    """Close a loader, or a pass over its batches, at the end of the program if it is still there.

    Its processes and threads end while they can be waited for: before multiprocessing waits for
    them in vain, and before the interpreter takes apart the modules that they use.

    Returns:
        The same.
    """
    atexit.register(_close, weakref.ref(loader))
    return loader


def _close(reference: weakref.ref[_Closes]) -> None:
    loader = reference()
    if loader is None:
        return
    try:
        loader.close()
    except Exception as error:  # the program is ending, perhaps of the very same error
        log.debug(f"a loader was not closed well: {error}")


def made_ahead(
    make: Callable[[Task], Made], tasks: Iterable[Task], *, count: int, threads: int = 1
) -> Generator[Made]:
    """Yield ``make(task)`` of each task in order, made in threads, up to ``count`` ahead.

    The threads end with the iterator, also with one that is left before its end. An error is raised
    where its result would be yielded.
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
