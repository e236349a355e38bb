"""Location of each rank in the program, so that other ranks can report one that hangs.

Once a second, a thread of each rank writes the function of fastsiam that the rank executes to
torch's store.
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
"""Seconds without a report after which a rank counts as stopped."""
_KEY = "fastsiam/rank_location/"

_step: int | None = None
_reporter: _Reporter | None = None


def in_step(number: int) -> None:
    """Note the training step that this rank starts."""
    global _step
    _step = number


def begin(store: Store, rank: int, world: int) -> None:
    """Start to report this rank's location."""
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
    """Return a text on the ranks that did not arrive, with their locations.

    Args:
        function: function of fastsiam in which this rank waited.

    Returns:
        The text; "" if the store is gone or all ranks wait in the same function.
    """
    if _reporter is None:
        return ""
    _reporter.gave_up_in = function
    time.sleep(2 * _INTERVAL)  # so that other ranks that gave up have reported it
    found: list[str] = []
    # In a thread, because reading the store blocks for minutes if the network is down.
    reading = threading.Thread(target=_reporter.describe_others, args=(found,), daemon=True)
    reading.start()
    reading.join(_SILENT)
    return "; ".join(found)


class _Reporter(threading.Thread):
    """Thread that reports this rank's location and reads those of the others."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        super().__init__(name="fastsiam-rank-location", daemon=True)
        # Separate connections, because a waiting collective blocks the shared one.
        self._write, self._read = store.clone(), store.clone()
        self._rank = rank
        self._main = threading.main_thread().ident or 0
        self._place: tuple[int | None, str] = None, ""
        self._since = time.monotonic()
        self.others = [other for other in range(world) if other != rank]
        self.is_over = threading.Event()
        self.gave_up_in = ""
        """Function in which this rank stopped waiting for another; "" before."""

    def run(self) -> None:
        """Report until ``is_over`` is set or the store is gone."""
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
        """Append the location of each rank that is elsewhere, until the store is gone."""
        with contextlib.suppress(RuntimeError, ValueError):
            for rank in self.others:
                if text := self._describe(rank):
                    texts.append(text)

    def _describe(self, rank: int) -> str:
        """Return the location of another rank; "" if it waits too, or in the same function."""
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
    """Return the innermost function of fastsiam on a stack, and its line with the callee."""
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
