"""Signals: which end a command, what handles them for a while, what they are called."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a command early: Ctrl-C, a scheduler's end, a terminal that is closed."""


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


def signal_name(number: int) -> str:
    """Return what a signal is called, such as SIGTERM; real-time signals have numbers alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
