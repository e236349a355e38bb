"""Work shared among forked processes that leave no trace behind, whatever ends them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import FrameType
from typing import Any

from fastsiam.errors import WorkerError
from fastsiam.kernels import mappings
from fastsiam.kernels.cores import cores
from fastsiam.signals import STOPS, handled, signal_name

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
        WorkerError: a process was killed.
    """
    workers = workers if workers > 0 else cores()
    pool = ProcessPoolExecutor(
        workers,
        get_context("fork"),  # light: what is shared stays where it is
        initializer=_enter,
        initargs=(os.getpid(), begin, arguments),
    )

    processes: list[Any] = []

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: set[Future[Any]] = set()
        rest = iter(tasks)
        while True:
            for task in rest:
                with signals_held():  # a pool of which half was started cannot be ended
                    waiting.add(pool.submit(_checked, function, task))
                processes[:] = processes or pool._processes.values()  # all begin with the first
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
        # Before it has ended, the pool's own thread waits for the dead process too, and the system
        # tells how it ended to one of them alone.
        pool.shutdown(wait=True, cancel_futures=True)
        raise WorkerError(_dead(processes)) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def killed(which: str, code: int | None) -> str:
    """Say what ended a process, why that may be, and what to do.

    Args:
        which: the process.
        code: its exit code, minus the number of the signal that ended it.
    """
    if code is None or code >= 0:
        return f"{which} ended by itself (exit code {code}); {_GOES_ON}"
    cause = _CAUSES.get(-code, "")
    return f"{which} was killed by {signal_name(-code)}{cause}; {_GOES_ON}"


_GOES_ON = "the same command goes on"
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        ", as the system does where memory runs out (dmesg tells): lower --workers, or give it more"
    ),
    signal.SIGBUS: ": /dev/shm may be full (docker run --shm-size=8g), or a file's disk failed",
    signal.SIGSEGV: ": a fault of a library, perhaps at a bad image (fastsiam convert verify)",
}


def _dead(processes: Iterable[Any]) -> str:
    """Say which process of a pool was killed; those that the pool ended itself are not meant."""
    by_the_pool = (None, 0, -signal.SIGTERM, -signal.SIGALRM)
    known = list(processes)
    for process in known:
        if process.exitcode not in by_the_pool:
            which = f"process {process.pid}, one of {len(known)} at work,"
            return killed(which, process.exitcode)
    return f"one of {len(known)} processes at work was killed; {_GOES_ON}"


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Have a signal that would stop this process come at the end of the block, not within it.

    A process that is forked within leaves them to its parent from its first moment on.
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
    """What stops a command reaches the whole group; the parent still needs its workers' results.

    After SIGTERM or SIGHUP a worker goes on for a few seconds, and then it ends: it may be the
    parent's multiprocessing that sent it, which waits for the worker before the parent exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_soon)


def _end_soon(*_: object) -> None:
    signal.alarm(_GRACE_SECONDS)


def _checked(function: Callable[[Any], Any], task: Any) -> Any:
    result = function(task)
    mappings.check_others(_known_lost)
    return result


_known_lost: frozenset[int] = frozenset()
"""In a process: mappings that were lost before it was forked, which the parent answers for."""


def _enter(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    leave_signals_to_the_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the parent
        if os.getppid() != parent:
            os._exit(1)
    global _known_lost
    _known_lost = mappings.lost_places()
    gc.disable()  # nothing here makes cycles
    begin(*arguments)
