"""Loader processes and threads: how many, and how they behave."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from fastsiam.kernels.cores import own_cores

from .processes import leave_signals_to_the_parent
from .shared_memory import ITEMS_AHEAD

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Made = TypeVar("Made")


def count(workers: int) -> int:
    """Fill in -1: the cores that this process may use, shared among the ranks of this machine."""
    return workers if workers >= 0 else own_cores()


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
        prefetch_factor=ITEMS_AHEAD if workers > 0 else None,
        persistent_workers=persistent and workers > 0,
        worker_init_fn=_begin_worker,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a persistent loader's processes now, whoever still holds one of its iterators."""
    iterator = getattr(loader, "_iterator", None)  # torch offers no public way
    if iterator is not None:
        iterator._shutdown_workers()


class _Closes(Protocol):
    def close(self) -> None: ...


Closes = TypeVar("Closes", bound=_Closes)


def closes_at_exit(loader: Closes) -> Closes:
    """Have a loader, or a pass over its batches, closed at the end of the program if it is open.

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
