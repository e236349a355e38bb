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
from typing import Any, NoReturn

from fastsiam.errors import SIGNALLED

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command early: Ctrl-C, termination by a scheduler, a closed terminal."""

ECHO = 0.25
"""Seconds for which a repeated signal is ignored: a parent program may forward a signal that the
terminal already sent to all processes."""


@contextlib.contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[dict[signal.Signals, Any]]:
    """Handle signals within the block, except those that are ignored (nohup).

    Yields the handlers that are set after the block, which the block may change.
    """
    all_handlers = {number: signal.getsignal(number) for number in numbers}
    old_handlers = {x: old for x, old in all_handlers.items() if old not in (signal.SIG_IGN, None)}
    for number in old_handlers:
        signal.signal(number, handler)
    try:
        yield old_handlers
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
    Repetitions are also ignored after the block, while the process cleans up: a launcher may
    forward a signal late, and when a parent is killed, the kernel sends the signal of
    ``die_with_parent`` each time one of the parent's threads ends.
    """
    received: dict[signal.Signals, float] = {}  # the first signal, and when it came

    def stop(number: int, _: FrameType | None) -> None:
        if not received:
            received[signal.Signals(number)] = time.monotonic()
            first(number)
        elif time.monotonic() - min(received.values()) > echo(number):
            again(number)

    with handle_signals(numbers, stop) as later_handlers:
        try:
            yield
        finally:
            for number, since in received.items():
                later_handlers[number] = _ignore_until(since + echo(number), later_handlers[number])


def _ignore_until(end: float, old: Any) -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that does nothing until a time; then it restores ``old``."""

    def ignore(number: int, _: FrameType | None) -> None:
        if time.monotonic() > end:
            signal.signal(number, old)
            signal.raise_signal(number)

    return ignore


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
