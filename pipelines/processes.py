"""Processes that share work, and that always end with the process that started them."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, get_context
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Any

from fastsiam.errors import WorkerError
from fastsiam.kernels import mappings
from fastsiam.kernels.cores import cores
from fastsiam.signals import STOPS, ending_with, handled, signal_name

_GRACE_SECONDS = 5


class AbandonedError(Exception):
    """A task was given up because another failed, whose error is raised instead."""


def server_context(preload: str) -> BaseContext:
    """Return the way to start processes that read remote data: forked from a server process.

    obstore's threads, which this process may have, do not survive a fork. What the processes are
    given is pickled.

    Args:
        preload: module that the server imports once for all processes.
    """
    context = get_context("forkserver")
    server: Any = forkserver._forkserver
    if set(server._preload_modules) <= {"__main__"}:  # the program asked for none
        context.set_forkserver_preload([preload])
    # Blocked signals stay blocked in the server and in what it forks, until they are set up there:
    # it has to live until its processes end, and they leave signals to this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


@contextlib.contextmanager
def forked(
    workers: int, work: Callable[[Any], Any], *, forks: bool = True
) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Yield run(tasks), which yields the results of a function as they are ready, in any order.

    Args:
        workers: processes; -1 is one for each core. They take the tasks in order.
        work: the function, which forked processes inherit, so it may be a closure. Tasks and
            results are pickled.
        forks: whether this process may be forked; if not, ``work`` is pickled too, see
            ``server_context``.

    Raises:
        WorkerError: a process was killed.
    """
    workers = workers if workers > 0 else cores()
    pool = ProcessPoolExecutor(
        workers,
        get_context("fork") if forks else server_context(__name__),
        initializer=_enter,
        initargs=(os.getpid() if forks else 0, dict(os.environ), work),
    )
    processes: dict[int, Any] = {}

    def run(tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: set[Future[Any]] = set()
        rest = iter(tasks)
        while True:
            for task in rest:
                with signals_held():  # a pool of which half was started cannot be ended
                    waiting.add(pool.submit(_checked, task))
                processes.update(pool._processes)
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
        # The pool's thread waits for the dead process too, and the system tells only one of the two
        # how it ended: so let that thread end first.
        pool.shutdown(wait=True, cancel_futures=True)
        raise WorkerError(_dead([*processes.values()])) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def killed(which: str, code: int | None) -> str:
    """Return a message that says what ended a process, the likely cause, and what to do.

    Args:
        which: the process.
        code: its exit code, minus the number of the signal that ended it.
    """
    if code is None or code >= 0:
        return f"{which} ended by itself (exit code {code}); {_RESUME}"
    cause = _CAUSES.get(-code, "")
    return f"{which} was killed by {signal_name(-code)}{cause}; {_RESUME}"


_RESUME = "start the same command again to resume"
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        ", as the system does where memory runs out (dmesg tells): lower --workers, or give it more"
    ),
    signal.SIGBUS: ": /dev/shm may be full (docker run --shm-size=8g), or a file's disk failed",
    signal.SIGSEGV: ": a fault of a library, perhaps at a bad image (fastsiam convert verify)",
}


def _dead(processes: Sequence[Any]) -> str:
    """Return a message that says which process of a pool was killed, but not by the pool itself."""
    by_the_pool = (None, 0, -signal.SIGTERM, -signal.SIGALRM)
    for process in processes:
        if process.exitcode not in by_the_pool:
            which = f"process {process.pid}, one of {len(processes)} at work,"
            return killed(which, process.exitcode)
    return f"one of {len(processes)} processes at work was killed; {_RESUME}"


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that would stop this process to the end of the block.

    A process that is forked within the block leaves them to its parent from the start.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal reaches this one
        yield
        return
    held: list[int] = []
    parent = os.getpid()

    def hold(number: int, _: FrameType | None) -> None:
        if os.getpid() == parent:
            held.append(number)
        elif number != signal.SIGINT:
            _end_soon()

    try:
        with handled(STOPS, hold):
            yield
    finally:
        for first in held[:1]:
            signal.raise_signal(first)


def leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C in a worker, and end a few seconds after SIGTERM or SIGHUP.

    What stops a command reaches its whole process group, but the parent still needs its workers'
    results. The parent's multiprocessing may also have sent the signal: it waits for the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_soon)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # see ``server_context``


def end_with_the_parent() -> None:
    """End this process, which a server forked, when the one that asked for it is gone.

    The server is no help: it lives as long as what it forked.
    """
    if (parent := multiprocessing.parent_process()) is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, name="fastsiam-parent", daemon=True).start()


def _end_soon(*_: object) -> None:
    signal.alarm(_GRACE_SECONDS)


_work: Callable[[Any], Any]
"""In a process of a pool: its function."""
_known_lost: frozenset[int] = frozenset()
"""Mappings that were lost before this process was forked: the parent reports them."""


def _checked(task: Any) -> Any:
    result = _work(task)
    mappings.check_others(_known_lost)
    return result


def _enter(parent: int, environment: dict[str, str], work: Callable[[Any], Any]) -> None:
    """Set up a process.

    Args:
        parent: number of the process that forked it; 0: a server did.
        environment: the parent's; a server has the one that it was started with.
        work: its function.
    """
    leave_signals_to_the_parent()
    if not parent:
        end_with_the_parent()
    else:
        ending_with(parent, signal.SIGKILL)()
    os.environ.update(environment)
    global _known_lost, _work
    _known_lost, _work = mappings.lost_places(), work
    gc.disable()  # nothing here makes cycles
