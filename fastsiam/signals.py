"""Signals: which end a command, what Ctrl-C does twice, and how a process ends with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a command early: Ctrl-C, a scheduler's end, a terminal that is closed."""

ECHO = 0.25
"""Seconds in which a signal that comes again is the first one's: programs that started this one may
pass on what the terminal sent to all."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): which signal this process gets when the thread that started it ends."""

_first: float | None = None
"""When the first Ctrl-C came; None before."""
_is_hanging = False


@contextlib.contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Have signals handled so within the block, but those that this program is deaf to (nohup)."""
    before = {number: signal.getsignal(number) for number in numbers}
    heard = {x: old for x, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in heard.items():
            signal.signal(number, old)


@contextlib.contextmanager
def stops_handled(
    first: Callable[[int], object], *, again: Callable[[int], object]
) -> Iterator[None]:
    """Handle the signals that end a command early within the block.

    Args:
        first: called with the number of the first signal.
        again: called with that of a later one; echoes of the first are ignored.
    """
    since: float | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            first_is_handled()  # for the program's own handler, once this one is gone
            first(number)
        elif time.monotonic() - since > ECHO:
            again(number)

    with handled(STOPS, stop):
        yield


def signal_name(number: int) -> str:
    """Return what a signal is called, such as SIGTERM; real-time signals have numbers alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending_with(parent: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return what a new process does to get a signal when the thread that started it ends.

    It may be called between fork and exec, where little is safe: all it needs is loaded before.

    Args:
        parent: the number of the process that starts it. If that is gone already by the time of
            the call, the signal comes at once.
        number: the signal.
    """
    if sys.platform != "linux":  # no other system has it
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return ask


def note_hanging() -> None:
    """Note that a library's thread hangs: at the end of the program it may wait for minutes."""
    global _is_hanging
    _is_hanging = True


def is_hanging() -> bool:
    """Tell whether the command has to leave without what libraries do at its end."""
    return _is_hanging


def leave_at_once(number: int) -> NoReturn:
    """End this process and its workers as a signal does, without a word of theirs.

    A worker that is left alone would write into a pipe that nobody reads, and say so.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(128 + number)


def leave_at_the_second() -> None:
    """Have the first Ctrl-C raise ``KeyboardInterrupt``, as ever, and a second leave at once.

    Where the program is deaf to it, or something else handles it, that stays so.
    """
    global _first
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _first = None
        signal.signal(signal.SIGINT, _interrupt)


def first_is_handled() -> None:
    """Note that something else than ``KeyboardInterrupt`` came of the first Ctrl-C."""
    global _first
    _first = time.monotonic()


def _interrupt(number: int, _: FrameType | None) -> None:
    if _first is None:
        first_is_handled()
        raise KeyboardInterrupt
    if time.monotonic() - _first > ECHO:
        leave_at_once(number)
