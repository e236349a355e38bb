"""Handlers for signals that end a command, and its exit code."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

from fastsiam.errors import SIGNALLED

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command early: Ctrl-C, termination by a scheduler, a closed terminal."""

ECHO = 0.25
"""Seconds for which a repeated signal is ignored: a parent program may forward a signal that the
terminal already sent to all processes."""


@contextlib.contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals within the block, except those that are ignored (nohup)."""
    all_handlers = {number: signal.getsignal(number) for number in numbers}
    old_handlers = {x: old for x, old in all_handlers.items() if old not in (signal.SIG_IGN, None)}
    for number in old_handlers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)


@contextlib.contextmanager
def handle_stop_signals(
    first: Callable[[int], object],
    *,
    again: Callable[[int], object],
    numbers: Iterable[signal.Signals] = STOPS,
    echo: Callable[[int], float] = lambda _: ECHO,
) -> Iterator[None]:
    """Within the block, call ``first`` with the first signal, and ``again`` with a later one.

    Within ``echo`` seconds, which may depend on the signal, it is only a repetition of the first.
    """
    since: float | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            first(number)
        elif time.monotonic() - since > echo(number):
            again(number)

    with handle_signals(numbers, stop):
        yield


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM; real-time signals only have numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_after_signal(number: int) -> NoReturn:
    """Exit after the usual cleanup, with the exit code of a signal."""
    sys.exit(SIGNALLED + number)


def exit_immediately(number: int) -> NoReturn:
    """Kill the worker processes and exit immediately, with the exit code of a signal.

    Workers that survive would print errors about a broken pipe.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(SIGNALLED + number)
