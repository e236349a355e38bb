"""Worker threads and processes of loaders and conversions, and their shutdown at exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any, Protocol, TypeVar

from fastsiam.errors import WorkerError
from fastsiam.kernels.cores import cores, own_cores

log = logging.getLogger(__name__)

Task = TypeVar("Task")
Made = TypeVar("Made")

_GRACE_SECONDS = 5
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals sent to all processes by a terminal, or by SLURM before a job's time limit."""
_HELP = (
    "memory or /dev/shm may be full: lower --workers, or give a container more of it (docker run "
    "--shm-size=8g); start the same command again to resume"
)


def count(workers: int | str) -> int:
    """Return the initial number of workers; -1 and "auto" mean one per core of this rank."""
    return workers if isinstance(workers, int) and workers >= 0 else own_cores()


class Closes(Protocol):
    """An object with threads or processes that ``close`` ends."""

    def close(self) -> None:
        """End them; can be called more than once."""


_open: weakref.WeakSet[Closes] = weakref.WeakSet()
"""Loaders and generators of batches that may have threads or processes."""
_inherited: list[Closes] = []
"""Objects that were in ``_open`` when this process was forked."""


def _keep_inherited() -> None:
    """Keep inherited loaders and generators of a forked process alive until after it exits.

    Their threads do not exist in the fork, and deleting them would wait for the threads.
    """
    _inherited.extend(_open)
    _open.clear()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_inherited))


os.register_at_fork(after_in_child=_keep_inherited)


def close_at_exit(loader: Closes) -> None:
    """Register a loader or a generator of batches to be closed when the program exits.

    Its processes and threads then end before multiprocessing would wait for them forever, and
    before the interpreter unloads the modules that they use.
    """
    _open.add(loader)
    atexit.unregister(_close_all)  # the last one registered runs first
    atexit.register(_close_all)


def _close_all() -> None:
    for loader in tuple(_open):
        try:
            loader.close()
        except Exception as error:  # the program may be exiting because of the same error
            log.debug(f"closing a loader failed: {error}")


def prefetch_map(
    make: Callable[[Task], Made], tasks: Iterable[Task], *, count: int, threads: int = 1
) -> Generator[Made]:
    """Yield ``make(task)`` for each task, in order; threads compute up to ``count`` tasks ahead.

    The threads end when the generator ends or is closed. An error is raised in place of a result.
    """
    rest = iter(tasks)
    with ThreadPoolExecutor(threads, "fastsiam-ahead") as pool:
        waiting = deque(pool.submit(make, task) for task in islice(rest, count))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(make, task) for task in islice(rest, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def server_context(preload: str) -> ForkServerContext:
    """Return the ``forkserver`` context, and start its server unless it runs.

    The server imports the module ``preload`` once for all processes. Processes that read remote
    data need it: obstore's threads, which this process may have, do not survive a fork. The
    arguments of the processes are pickled.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    resource_tracker.ensure_running()  # else the server starts it, which unblocks signals
    # The server inherits the mask. Without it, Ctrl-C during imports would print a traceback.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return context


def set_up_worker(environment: dict[str, str], _number: int = 0) -> None:
    """Set up this worker process: it ignores signals meant for its parent, and exits with it.

    Signals that stop a command reach its entire process group, but the parent still needs its
    workers' results. After SIGTERM, which a pool may send to end it, it exits in a few seconds.
    It gets the parent's ``environment``, because a fork server keeps the one it was started with.
    """
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
    # ``child_process.die_with_parent`` does not fit: the kernel would signal the worker as soon as
    # the thread that started it ends, and takes the fork server as the parent.
    threading.Thread(target=_die_with_parent, name="fastsiam-parent", daemon=True).start()
    os.environ.update(environment)


def _die_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def dead_worker(error: BaseException) -> WorkerError:
    """Return the error to raise if a library reports that a worker process was killed."""
    return WorkerError(f"a worker process died ({' '.join(str(error).split())}): {_HELP}")


@contextlib.contextmanager
def process_pool(
    workers: int, work: Callable[[Any], Any], *, forks: bool = True
) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Start a process pool; yield ``run(tasks)``, which yields results in the order of the tasks.

    Args:
        workers: number of processes; -1 means one per core.
        work: function of a task. Forked processes inherit it, so it may be a closure. Tasks and
            results are pickled.
        forks: whether this process may be forked; if not, ``work`` is pickled too, see
            ``server_context``.

    Raises:
        WorkerError: a worker process was killed.
    """
    workers = workers if workers > 0 else cores()
    existing_children = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("fork") if forks else server_context(__name__),
        initializer=_start_worker,
        initargs=(dict(os.environ), work),
    )

    def run(tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        rest = iter(tasks)
        while True:
            missing = 2 * workers + 2 - len(waiting)
            waiting.extend(pool.submit(_run, task) for task in islice(rest, missing))
            if not waiting:
                return
            yield waiting.popleft().result()

    try:
        yield run
    except BrokenProcessPool as error:
        raise dead_worker(error) from error
    finally:
        try:
            pool.shutdown(wait=True, cancel_futures=True)
        except RuntimeError:  # a signal interrupted the start of the thread that ends workers
            for worker in multiprocessing.active_children():
                if worker not in existing_children:
                    worker.kill()


_work: Callable[[Any], Any]
"""The pool's function, in a worker process."""


def _start_worker(environment: dict[str, str], work: Callable[[Any], Any]) -> None:
    global _work
    set_up_worker(environment)
    _work = work


def _run(task: Any) -> Any:
    return _work(task)
