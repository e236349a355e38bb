"""Where each rank is, so that one that does not come can be named, and what it does instead.

A thread of each rank looks once a second at which line of ours the rank is, and leaves that in the
store by which the ranks met. The training step tells it nothing but its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from fastsiam.console import duration

HOME = str(Path(__file__).parents[1]) + os.sep
_BEAT = 1.0
"""Seconds between two words of a rank."""
_SILENT = 10.0
"""Seconds without a word after which a rank is stopped, or holds Python's lock."""
_KEY = "fastsiam/whereabouts/"

_step: int | None = None
_telling: _Telling | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank says of itself."""

    step: int | None
    """The training step that it is in, or took last; None before the first."""
    function: str
    """Ours, which it is in."""
    line: str
    """Where in it: file and number; and which function of others is called there."""
    seconds: float
    """How long it has been in that function."""
    at: float
    """When it was said, in seconds since the epoch."""
    gave_up: bool = False
    """Whether it waited there for another rank, in vain."""

    @property
    def place(self) -> tuple[int | None, str]:
        """Where it is: ranks that wait for the same are at the same."""
        return self.step, self.function

    def __str__(self) -> str:
        """Say it for people."""
        step = "before the first step" if self.step is None else f"step {self.step:,}"
        return f"{step}, in {self.function} ({self.line}) for {duration(self.seconds)}"


def in_step(number: int) -> None:
    """Note that this rank begins a training step."""
    global _step
    _step = number


def tell() -> None:
    """Begin to tell the other ranks; they have met."""
    global _telling, _step
    stop()
    _step = None
    _telling = _Telling()
    _telling.start()


def stop() -> None:
    """Tell no more."""
    global _telling
    if _telling is not None:
        _telling.end()
    _telling = None


def missing(function: str) -> str:
    """Say which ranks do not come to where this one waited in vain, and where they are instead.

    Empty if nobody can tell: the store is gone, or all of them are at the same place.

    Args:
        function: of ours, in which this rank waited.
    """
    if _telling is None:
        return ""
    _telling.gave_up_in = function
    time.sleep(2 * _BEAT)  # until those that gave up as well have said so
    try:
        words = _telling.words()
    except (RuntimeError, ValueError):  # who keeps the store has left
        return ""
    own = _telling.here()
    now, late = time.time(), []
    for rank, word in words.items():
        if word is None:
            late.append(f"rank {rank}, which said nothing yet")
        elif (silent := now - word.at) > _SILENT:
            late.append(
                f"rank {rank}, which is stopped: its last word, {duration(silent)} ago, was {word}"
            )
        elif word.place != own.place and not word.gave_up:
            late.append(f"rank {rank}, which is elsewhere: {word}")
    return "; ".join(late)


class _Telling(threading.Thread):
    """Leaves this rank's word in the store, again and again."""

    def __init__(self) -> None:
        super().__init__(name="fastsiam-whereabouts", daemon=True)
        # A connection of its own: an exchange that waits holds the other one.
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._asked = dist.distributed_c10d._get_default_store().clone()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._is_over = threading.Event()
        self._place: tuple[int | None, str] | None = None
        self._since = time.monotonic()
        self.gave_up_in = ""
        """Where this rank waited in vain, once it did."""

    def run(self) -> None:
        """Tell until it is over, or nobody listens."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._store.set(f"{_KEY}{self._rank}", json.dumps(asdict(self.here())))
                if self._is_over.wait(_BEAT):
                    return

    def end(self) -> None:
        """Tell no more."""
        self._is_over.set()
        self.join(_BEAT)

    def here(self) -> Word:
        """Look where this rank is."""
        function, line = _own_place(sys._current_frames().get(self._main or 0))
        function = self.gave_up_in or function
        if self._place != (_step, function):
            self._place, self._since = (_step, function), time.monotonic()
        seconds = time.monotonic() - self._since
        return Word(_step, function, line, seconds, time.time(), bool(self.gave_up_in))

    def words(self) -> dict[int, Word | None]:
        """Return the last word of each other rank; None of one that said nothing."""
        found: dict[int, Word | None] = {}
        for rank in range(self._world):
            if rank != self._rank:
                key = f"{_KEY}{rank}"
                said: Any = self._asked.get(key) if self._asked.check([key]) else b""
                found[rank] = Word(**json.loads(said)) if said else None
        return found


def _own_place(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost function of ours, and where in it the process is."""
    inner = frame
    while frame is not None and not frame.f_code.co_filename.startswith(HOME):
        frame = frame.f_back
    if frame is None:
        return "no function of ours", "nowhere"
    at = f"{frame.f_code.co_filename.removeprefix(HOME)}:{frame.f_lineno}"
    if inner is not None and inner is not frame:
        code = inner.f_code
        at += f", which is in {code.co_name} of {Path(code.co_filename).name}"
    return frame.f_code.co_name, at
