"""Loader processes and threads: how many, and how they behave."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from fastsiam.errors import DataError, FastSiamError, WorkerError, lacks_memory
from fastsiam.kernels import mappings
from fastsiam.kernels.cores import own_cores

from .processes import killed, leave_signals_to_the_parent, signals_held
from .shared_memory import ITEMS_AHEAD
from .store import Store

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Made = TypeVar("Made")


def count(workers: int) -> int:
    """Fill in -1: the cores that this process may use, shared among the ranks of this machine."""
    return workers if workers >= 0 else own_cores()


def in_workers(
    dataset: _OfStore,
    tasks: Iterable[Any],
    *,
    workers: int,
    device: torch.device,
    persistent: bool,
) -> LoaderProcesses:
    """Run ``dataset[task]`` for each task in loader processes; results in order, uncollated.

    Where images lie on another machine, a process begins to fetch those of its next task with each.
    """
    workers = count(workers)
    if is_remote := dataset.store.is_remote:
        tasks = _AndNext(tasks, max(1, workers))
    loader = DataLoader(
        _Answers(dataset, fetches=is_remote),
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        prefetch_factor=ITEMS_AHEAD if workers > 0 else None,
        persistent_workers=persistent and workers > 0,
        worker_init_fn=_begin_worker,
    )
    return LoaderProcesses(loader)


class LoaderProcesses:
    """What loader processes make, in order; one that dies is said by name, within seconds.

    Iterating raises a ``WorkerError`` when a process was killed or found no memory, where the next
    item is asked for and nowhere else: torch would raise in the midst of whatever the program does,
    such as half an optimizer's step. A ``DataError`` is an item; any other ``FastSiamError`` of a
    process is raised.

    Args:
        loader: torch's.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the tasks' results; persistent processes make one pass at a time."""
        _require_alive(self._processes())
        iterator = self._begun()
        processes = self._processes(iterator)
        while True:
            _require_alive(processes)
            with _explained(processes):
                item = next(iterator, _END)
            if item is _END:
                return
            if isinstance(item, FastSiamError) and not isinstance(item, DataError):
                raise item
            yield item

    def __len__(self) -> int:
        """Count the tasks of a pass."""
        return len(self._loader)

    def shut_down(self) -> None:
        """End persistent processes now, whoever still holds one of the iterators."""
        if self._persistent is not None:
            self._persistent._shutdown_workers()

    def _begun(self) -> Iterator[Any]:
        before = signal.getsignal(signal.SIGCHLD)
        try:
            with _explained(self._processes()), signals_held():
                return iter(self._loader)
        finally:
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGCHLD, before)  # torch's handler raises wherever we are

    @property
    def _persistent(self) -> Any:
        return getattr(self._loader, "_iterator", None)  # torch offers no public way

    def _processes(self, iterator: object = None) -> Sequence[multiprocessing.Process]:
        """Return the processes of an iterator, or those that wait for another pass."""
        return getattr(iterator or self._persistent, "_workers", ())


_END = object()
_SECONDS_TO_DIE = 5.0


class _OfStore(Protocol):
    store: Store

    def __getitem__(self, task: Any) -> Any: ...


class _Answers(Dataset[Any]):
    """Another one's items, or the errors of the user's world in their place.

    Raised in a process, an error would arrive wrapped in that process's traceback.
    """

    def __init__(self, dataset: _OfStore, *, fetches: bool = False) -> None:
        self._dataset, self._fetches = dataset, fetches

    def __getitem__(self, task: Any) -> Any:
        try:
            if self._fetches:
                task, following = task
                for own in (task, following):
                    if own is not None:
                        self._dataset.store.ahead(getattr(own, "images", own).tolist())
            item = self._dataset[task]
            self._dataset.store.check()
        except FastSiamError as error:
            return error
        return item


class _AndNext:
    """Tasks, each with the one that the same process has next, or None.

    Args:
        tasks: images' positions, or what has such ``images``.
        processes: among whom they are dealt, in turn.
    """

    def __init__(self, tasks: Iterable[Any], processes: int) -> None:
        self._tasks, self._processes = tasks, processes

    def __len__(self) -> int:
        return len(self._tasks)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        waiting: deque[Any] = deque()
        for task in self._tasks:
            waiting.append(task)
            if len(waiting) > self._processes:
                yield waiting.popleft(), task
        while waiting:
            yield waiting.popleft(), None


@contextlib.contextmanager
def _explained(processes: Sequence[multiprocessing.Process]) -> Iterator[None]:
    """Say of what fails inside whether a process died of it, or found no memory."""
    try:
        yield
    except (RuntimeError, OSError, EOFError, MemoryError) as error:
        if isinstance(error, (OSError, EOFError)):  # sockets and pipes close before it is gone
            ended = wait([process.sentinel for process in processes], _SECONDS_TO_DIE)
            for process in processes:
                if process.sentinel in ended:
                    process.join()
        _require_alive(processes)
        if processes and lacks_memory(error):
            raise WorkerError(
                f"one of {len(processes)} loader processes found no memory: lower --workers or "
                "--batch; the same command goes on"
            ) from error
        raise


def _require_alive(processes: Sequence[multiprocessing.Process]) -> None:
    """Raise a ``WorkerError`` if one of some processes has ended."""
    for number, process in enumerate(processes, 1):
        if not process.is_alive():
            which = f"loader process {number} of {len(processes)} (process {process.pid})"
            raise WorkerError(killed(which, process.exitcode))


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
    make: Callable[[Task], Made], tasks: Iterable[Task], *, count: int, threads: int = 1
) -> Generator[Made]:
    """Yield ``make(task)`` of each task in order, made in threads, up to ``count`` ahead.

    The threads end with the iterator, also with one that is left before its end. An error comes
    out in the place of its result.
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


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(_: int) -> None:
    leave_signals_to_the_parent()
    mappings.watch_again()
