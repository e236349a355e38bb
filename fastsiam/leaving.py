"""Leaving at once: when Ctrl-C comes again, or when a library would hang on the way out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import FrameType
from typing import NoReturn

ECHO = 0.25
"""Seconds in which a signal that comes again is the first one's: programs that started this one may
pass on what the terminal sent to all."""

_since: float | None = None
"""When the first came; None before."""


_is_hanging = False


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
    global _since
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _since = None
        signal.signal(signal.SIGINT, _interrupt)


def first_is_handled() -> None:
    """Note that something else than ``KeyboardInterrupt`` came of the first Ctrl-C."""
    global _since
    _since = time.monotonic()


def _interrupt(number: int, _: FrameType | None) -> None:
    if _since is None:
        first_is_handled()
        raise KeyboardInterrupt
    if time.monotonic() - _since > ECHO:
        leave_at_once(number)
