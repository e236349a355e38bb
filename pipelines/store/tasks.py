"""One function for many tasks, in processes that share what it refers to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fastsiam.console import tally

from ..processes import forked

R = TypeVar("R")


@contextlib.contextmanager
def in_processes(
    work: Callable[[Any], R], *, workers: int = -1, forks: bool = True
) -> Iterator[Callable[[Iterable[Any]], Iterator[R]]]:
    """Yield run(tasks), which yields the results of a function as they are ready, in any order.

    Args:
        work: the function; processes inherit it, so it may be a closure. Tasks and results are
            pickled.
        workers: processes; -1 is one for each core.
        forks: whether this process may be forked; if not, the function is pickled too.

    Raises:
        WorkerError: a process was killed.
    """
    with forked(workers, work, forks=forks) as run:
        yield run


def numbered(work: Callable[[int], R], tasks: int, what: str) -> list[R]:
    """Return the results of a function for the tasks 0, 1, ..., and show how many are done."""
    results: dict[int, R] = {}
    with tally(what, tasks) as done, in_processes(lambda task: (task, work(task))) as run:
        for task, result in run(range(tasks)):
            results[task] = result
            done.add()
    return [results[task] for task in range(tasks)]
