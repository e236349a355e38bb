"""Worker processes of torch's DataLoader, with bounded shared memory and errors that name a worker.

Their items wait in shared memory. A process that writes more to /dev/shm than fits is killed by
SIGBUS without a message, and Docker's default is 64 MiB, so the items are made small enough.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastsiam.errors import BackendError, FastSiamError, WorkerError, lacks_memory
from fastsiam.kernels import mappings
from fastsiam.kernels.cores import local_ranks
from fastsiam.views.batch import Shape

from .processes import (
    end_with_the_parent,
    killed,
    leave_signals_to_the_parent,
    server_context,
    signals_held,
)

_ITEMS_AHEAD = 2
"""Items that may wait for each process: the DataLoader's prefetch factor."""
_MOST_BYTES = 2**30
"""Bytes of all waiting items of a rank: some seconds of work for any number of processes."""
_PLACE = Path("/dev/shm")
_SECONDS_TO_DIE = 5.0
_END = object()


def images_of_an_item(shapes: Sequence[Shape], *, workers: int) -> int:
    """Return the number of images of an item, which is a batch or a part of one.

    All items that can wait at once take at most 1 GiB, and half of the free shared memory.

    Args:
        shapes: shape (V, N, S, S, 3) of a rank's crops, uint8, for each side. An item has at most N
            images.
        workers: loader processes of this rank; 0 uses no shared memory.

    Raises:
        BackendError: shared memory cannot hold items of a single image.
    """
    batch = shapes[0][1]
    if workers == 0:
        return batch
    each = sum(map(math.prod, shapes)) // batch
    least = workers * _ITEMS_AHEAD * each
    most = _MOST_BYTES
    if (free := _free_bytes()) is not None:
        ranks = local_ranks()
        own = free // ranks
        if least > own:
            whose = f"{workers} loader processes" + (f" of each of {ranks} ranks" * (ranks > 1))
            fewer = own // (_ITEMS_AHEAD * each)
            raise BackendError(
                f"{_PLACE} has {free / 2**20:,.1f} MiB free, and {whose} need at least "
                f"{least * ranks / 2**20:,.1f} MiB: give a container more of it (docker run "
                f"--shm-size=8g), choose --workers {fewer}, or --pipeline native, "
                "which works in threads"
            )
        most = min(most, own // 2)
    return min(batch, max(1, most // least))


def _free_bytes() -> int | None:
    """Return the free bytes of shared memory; None if the system has no /dev/shm."""
    if not _PLACE.is_dir():
        return None
    found = os.statvfs(_PLACE)
    return found.f_bavail * found.f_frsize


class LoaderProcesses:
    """Worker processes that make items in order, one pass at a time, until ``close``.

    When a process is killed or runs out of memory, the request for the next item raises a
    ``WorkerError``. Torch would raise wherever the program is, such as in an optimizer step.

    Args:
        dataset: maps a task to its item, or to a ``FastSiamError`` that is raised in this process.
            An error that a worker raises would be wrapped in the worker's traceback.
        tasks: tasks of a pass.
        workers: number of processes; 0 makes the items in this process.
        device: device of the items later; for a GPU they are put into pinned memory.
        forks: whether this process may be forked; if not, see ``server_context``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        tasks: Iterable[Any],
        *,
        workers: int,
        device: torch.device,
        forks: bool = True,
    ) -> None:
        context = None
        if workers > 0 and not forks:
            context = server_context(type(dataset).__module__)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=tasks,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            prefetch_factor=_ITEMS_AHEAD if workers > 0 else None,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_begin_worker, None if forks else dict(os.environ)),
            multiprocessing_context=context,
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items of a pass."""
        self._require_alive()
        items = self._begin()
        while True:
            self._require_alive()
            with self._explained():
                item = next(items, _END)
            if item is _END:
                return
            if isinstance(item, FastSiamError):
                raise item
            yield item

    def close(self) -> None:
        """End the processes now, even if an iterator is still in use."""
        if self._loader._iterator is not None:
            self._loader._iterator._shutdown_workers()  # type: ignore[attr-defined]

    def _begin(self) -> Iterator[Any]:
        before, collects = signal.getsignal(signal.SIGCHLD), gc.isenabled()
        gc.disable()  # in what is forked too; see ``_begin_worker``
        try:
            with self._explained(), signals_held():
                return iter(self._loader)
        finally:
            if collects:
                gc.enable()
            if threading.current_thread() is threading.main_thread() and before is not None:
                signal.signal(signal.SIGCHLD, before)  # torch's handler raises in any place

    @property
    def _processes(self) -> Sequence[Any]:
        """The processes, once there are any; torch offers no public way to them."""
        return getattr(self._loader._iterator, "_workers", ())

    def _require_alive(self) -> None:
        processes = self._processes
        for number, process in enumerate(processes, 1):
            if not process.is_alive():
                which = f"loader process {number} of {len(processes)} (process {process.pid})"
                raise WorkerError(killed(which, process.exitcode))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors that a dead process or a lack of memory caused into a ``WorkerError``."""
        try:
            yield
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            processes = self._processes
            if isinstance(error, (OSError, EOFError)):  # pipes close before the process has ended
                ended = wait([process.sentinel for process in processes], _SECONDS_TO_DIE)
                for process in processes:
                    if process.sentinel in ended:
                        process.join()
            self._require_alive()
            if processes and lacks_memory(error):
                raise WorkerError(
                    f"one of {len(processes)} loader processes ran out of memory: lower --workers "
                    "or --batch; start the same command again to resume"
                ) from error
            raise


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(environment: dict[str, str] | None, _: int) -> None:
    """Set up a worker; one that a server forked gets the environment of this program.

    It collects only its own garbage: DALI's graphs wait forever where they end in another process.
    """
    gc.freeze()
    gc.enable()
    leave_signals_to_the_parent()
    if environment is not None:
        end_with_the_parent()
        os.environ.update(environment)
    mappings.watch_again()
