"""Loader processes and threads: how many, and how they behave."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from .processes import cores, leave_signals_to_the_parent

Task = TypeVar("Task")
Made = TypeVar("Made")


def count(workers: int) -> int:
    """Fill in -1: the cores that this process may use, shared among the ranks of this machine."""
    if workers >= 0:
        return workers
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def in_workers(
    dataset: Dataset[Any],
    tasks: Iterable[Any],
    *,
    workers: int,
    device: torch.device,
    persistent: bool,
) -> DataLoader[Any]:
    """Run ``dataset[task]`` for each task in loader processes; results in order, uncollated."""
    workers = count(workers)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        persistent_workers=persistent and workers > 0,
        worker_init_fn=_begin_worker,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a persistent loader's processes now, whoever still holds one of its iterators."""
    iterator = getattr(loader, "_iterator", None)  # torch offers no public way
    if iterator is not None:
        iterator._shutdown_workers()


def made_ahead(
    make: Callable[[Task], Made], tasks: Iterable[Task], *, count: int
) -> Iterator[Made]:
    """Yield ``make(task)`` of each task in order, made in a thread, up to ``count`` ahead.

    The thread ends with the iterator, also with one that is left before its end. An error comes
    out in the place of its result.
    """
    rest = iter(tasks)
    with ThreadPoolExecutor(1, "fastsiam-ahead") as thread:
        waiting = deque(thread.submit(make, task) for task in islice(rest, count))
        try:
            while waiting:
                made = waiting.popleft().result()
                waiting.extend(thread.submit(make, task) for task in islice(rest, 1))
                yield made
        finally:
            thread.shutdown(cancel_futures=True)


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(_: int) -> None:
    leave_signals_to_the_parent()
