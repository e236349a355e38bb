"""Where each rank is, so that the others can name one that hangs.

A thread of each rank looks once a second in which function of fastsiam the rank is, and writes that
to the store by which the ranks meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from torch.distributed.distributed_c10d import Store

from fastsiam.console import duration

HOME = str(Path(__file__).parents[1]) + os.sep
_INTERVAL = 1.0
"""Seconds between two reports of a rank."""
_SILENT = 10.0
"""Seconds without a report after which a rank is stopped, or holds Python's lock."""
_KEY = "fastsiam/rank_location/"

_step: int | None = None
_reporter: _Reporter | None = None


def in_step(number: int) -> None:
    """Note that this rank begins a training step."""
    global _step
    _step = number


def begin(store: Store, rank: int, world: int) -> None:
    """Start to report where this rank is."""
    global _reporter, _step
    end()
    _step = None
    _reporter = _Reporter(store, rank, world)
    _reporter.start()


def end() -> None:
    """Stop reporting."""
    global _reporter
    if _reporter is not None:
        _reporter.is_over.set()
        _reporter.join(_INTERVAL)
    _reporter = None


def missing(function: str) -> str:
    """Return which ranks are elsewhere than this one, which waited for them in vain, and where.

    Args:
        function: of fastsiam, in which this rank waited.

    Returns:
        Empty if nobody can tell: the store is gone, or all ranks wait for the same.
    """
    if _reporter is None:
        return ""
    _reporter.gave_up_in = function
    time.sleep(2 * _INTERVAL)  # until the others that gave up have reported it
    found: list[str] = []
    # In a thread: reading the store blocks for minutes if this machine lost its network.
    reading = threading.Thread(target=_reporter.describe_others, args=(found,), daemon=True)
    reading.start()
    reading.join(_SILENT)
    return "; ".join(found)


class _Reporter(threading.Thread):
    """Reports where this rank is, and reads the reports of the others."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        super().__init__(name="fastsiam-rank-location", daemon=True)
        # Connections of their own: a collective that waits blocks the ranks' common one.
        self._write, self._read = store.clone(), store.clone()
        self._rank = rank
        self._main = threading.main_thread().ident or 0
        self._place: tuple[int | None, str] = None, ""
        self._since = time.monotonic()
        self.others = [other for other in range(world) if other != rank]
        self.is_over = threading.Event()
        self.gave_up_in = ""
        """The function in which this rank waited for another in vain, once it did."""

    def run(self) -> None:
        """Report until the end, or until the store is gone."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._write.set(f"{_KEY}{self._rank}", json.dumps(self._report()))
                if self.is_over.wait(_INTERVAL):
                    return

    def _report(self) -> dict[str, object]:
        function, line = _locate(sys._current_frames().get(self._main))
        place = _step, self.gave_up_in or function
        if self._place != place:
            self._place, self._since = place, time.monotonic()
        step = "before the first step" if _step is None else f"step {_step:,}"
        for_ = duration(time.monotonic() - self._since)
        text = f"{step}, in {place[1]} ({line}) for {for_}"
        return {"place": place, "text": text, "time": time.time(), "waits": bool(self.gave_up_in)}

    def describe_others(self, texts: list[str]) -> None:
        """Append where each rank is that is elsewhere, until the store is gone."""
        with contextlib.suppress(RuntimeError, ValueError):
            for rank in self.others:
                if text := self._describe(rank):
                    texts.append(text)

    def _describe(self, rank: int) -> str:
        """Return where another rank is; empty if it waits too, or is where this one is."""
        key = f"{_KEY}{rank}"
        if not self._read.check([key]):
            return f"rank {rank}, which has not started"
        report = json.loads(self._read.get(key))
        if (silent := time.time() - report["time"]) > _SILENT:
            return (
                f"rank {rank}, which is stopped: its last report, {duration(silent)} ago, was "
                f"{report['text']}"
            )
        if report["waits"] or tuple(report["place"]) == (_step, self.gave_up_in):
            return ""
        return f"rank {rank}, which is elsewhere: {report['text']}"


def _locate(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost function of fastsiam on a stack, and its line with what it calls."""
    inner = frame
    while frame is not None and not frame.f_code.co_filename.startswith(HOME):
        frame = frame.f_back
    if frame is None:
        return "no function of fastsiam", "nowhere"
    line = f"{frame.f_code.co_filename.removeprefix(HOME)}:{frame.f_lineno}"
    if inner is not None and inner is not frame:
        code = inner.f_code
        line += f", which is in {code.co_name} of {Path(code.co_filename).name}"
    return frame.f_code.co_name, line
