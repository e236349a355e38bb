"""Messages and progress: bars in a terminal, plain lines in a log file.

Bars are drawn without a thread, because loader processes are forked while a bar is on the screen. A
lock held by a thread at that moment would stay locked in the child.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 10.0
"""Seconds between two progress lines without a terminal."""

_LONG_SECONDS = 5.0
"""Seconds after which a tally appears."""

_DRAW_SECONDS = 0.1
"""Seconds between two updates of a tally."""


class _Stderr:
    """Standard error stream that ignores ``OSError``.

    The disk may be full, or the reader of a pipe may have exited: Ctrl-C also ends a ``tee``.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # Rich's bars replace stderr


@cache
def _shared(can_draw: bool) -> RichConsole:
    """Return the console that all bars of this process share, so that Rich can stack them."""
    out: Any = _Stderr()
    force = None if can_draw else False
    return RichConsole(file=out, force_terminal=force, highlight=False, soft_wrap=True, emoji=False)


class Console:
    """Messages and progress on stderr.

    Args:
        quiet: print nothing, as on all ranks except rank 0.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        # FORCE_COLOR does not make a log file a terminal, and Rich draws no bars in dumb terminals.
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        self._out = _shared(_Stderr().isatty() and not dumb)
        self._quiet = quiet
        self._progress: Progress | None = None
        self._last_line = -_LINE_SECONDS
        self._total: int | None = None
        self._unit = ""

    def say(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            self._out.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning."""
        if not self._quiet:
            self._out.print(f"warning: {text}", style="yellow", markup=False)

    @contextlib.contextmanager
    def progress(
        self, total: int | None, done: int, unit: str = "step", *, transient: bool = False
    ) -> Iterator[None]:
        """Show a progress bar inside a ``with`` block; remove it at the end if it is ``transient``.

        ``total`` and ``done`` are numbers of units; ``total`` is None if it is unknown.
        """
        self._total, self._unit = total, unit
        if self._quiet or not self._out.is_terminal:
            yield
            return
        bar = (BarColumn(20),) if self._out.width >= 110 else ()
        columns = TextColumn("{task.description}", markup=False), *bar
        display = Progress(*columns, console=self._out, auto_refresh=False, transient=transient)
        with display as self._progress:
            self._progress.add_task(self._count(done), total=total, completed=done)
            try:
                yield
            finally:
                self._progress = None

    def tally(self, what: str, total: int | None = None, *, done: int = 0) -> Tally:
        """Return a ``Tally``, which prints nothing if this console is quiet."""
        return Tally(what, total, done=done, quiet=self._quiet)

    def advance(self, completed: int, text: str, *, place: str = "") -> None:
        """Update the bar; without a terminal, print a line every ten seconds and at the end.

        ``place`` follows the number of completed units in a plain line.
        """
        if self._progress:
            task, text = self._progress.task_ids[0], f"{self._count(completed)} {text}"
            self._progress.update(task, completed=completed, description=text, refresh=True)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or completed == self._total:
            self._last_line = time.monotonic()
            self.say(f"{self._unit} {completed:,}{place}: {text}")

    def _count(self, completed: int) -> str:
        total = "" if self._total is None else f"/{self._total:,}"
        return f"{self._unit} {completed:,}{total}"

    def show(self, values: dict[str, Any], *, remaining: int, batch: int) -> None:
        """Show a log line, and the time left for ``remaining`` steps of ``batch`` images."""
        text = (
            f"loss {values['loss']:.3f}, std {values['z_std']:.2f}, rank {values['rank']:.0f}, "
            f"data wait {values['data_wait']:.0%}, "
            f"{pace(values['images_per_second'], remaining * batch)}"
        )
        self.advance(values["step"], text, place=f" (epoch {values['epoch']:.2f})")


class Tally(contextlib.ExitStack):
    """Context manager that shows progress and speed of work that takes longer than five seconds.

    ``what`` is the work and its unit, such as "decoding images". ``total`` is the number of units,
    if known, and ``done`` the number that an earlier process finished.
    """

    def __init__(
        self, what: str, total: int | None = None, *, done: int = 0, quiet: bool = False
    ) -> None:
        super().__init__()
        self._console, self._total, self._first = Console(quiet=quiet), total, done
        self._bar = self._console.progress(total, 0, what, transient=True)
        self._began = self._last = time.monotonic()
        self.done = done

    def add(self, count: int = 1) -> None:
        """Add to the number of units done."""
        self.done += count
        now = time.monotonic()
        is_shown = self._last > self._began
        if now - self._last < (_DRAW_SECONDS if is_shown else _LONG_SECONDS):
            return
        self._last = now
        if not is_shown:
            self.enter_context(self._bar)
        speed = (self.done - self._first) / (now - self._began)
        remaining, total_text = None, ""
        if self._total is not None:
            remaining, total_text = max(0, self._total - self.done), f" of {self._total:,}"
        self._console.advance(self.done, pace(speed, remaining, unit=""), place=total_text)


def tally(what: str, total: int | None = None) -> Tally:
    """Return a ``Tally``, which prints nothing if log messages are disabled."""
    return Tally(what, total, quiet=not logging.getLogger("fastsiam").isEnabledFor(logging.INFO))


def duration(seconds: float) -> str:
    """Format a duration: 42 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def pace(speed: float, remaining: float | None = None, *, unit: str = " images") -> str:
    """Format a speed and, if known, the remaining time: 1,234 images/s, 3 min left.

    ``speed`` is in units per second, and ``remaining`` is the number of remaining units. ``unit``
    is their name after a space; empty if the reader knows it.
    """
    text = f"{speed:{',.0f' if speed >= 10 else '.2g'}}{unit}/s"
    if remaining is None:
        return text
    return f"{text}, {duration(remaining / max(speed, 1e-9))} left"


def format_number(value: float) -> str:
    """Format a number with at most two decimals: 24, 7.17."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def format_count(number: float, what: str) -> str:
    """Format a count with its noun: 1 epoch, 7.17 epochs, 1,200 epochs."""
    text = f"{number:,.2f}".rstrip("0").rstrip(".")
    return f"{text} {what}{'' if text == '1' else 's'}"


def text_of(value: Any) -> str:
    """Format a setting's value for display."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(text_of, value)) or "none"
        case "" | None:
            return "none"
    return str(value)


def size(count: float) -> str:
    """Format an amount of memory: 154 MB, 6.2 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            number = count / size
            return f"{number:,.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
    return f"{count / 1e3:,.0f} kB"
