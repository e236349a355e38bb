"""Messages and progress: bars in a terminal, plain lines in a log file.

Bars are drawn without a thread: loader processes are forked while a bar is on the screen, and a
lock that a thread held at that moment would stay locked in them. Only ``Console.status`` has one.
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
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 10.0
"""Without a terminal, seconds between two progress lines."""

_SETTLED_SECONDS = 2.0
"""Shortest time over which a speed is shown."""

_LONG_SECONDS = 5.0
"""A tally appears after this time: shorter work needs none."""

_DRAW_SECONDS = 0.1
"""Seconds between two updates of a tally's bar."""


class _Stderr:
    """Standard error; a line that cannot be written is lost instead of ending the run.

    The file may be on a full disk, or its reader gone: Ctrl-C also ends a ``tee``.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._now.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._now.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    @property
    def _now(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # a bar of Rich takes its place


@cache
def _shared(can_draw: bool) -> RichConsole:
    """Return the console of this process, which all bars share: Rich draws one below the other."""
    out: Any = _Stderr()
    force = None if can_draw else False
    return RichConsole(file=out, force_terminal=force, highlight=False, soft_wrap=True)


class Console:
    """Messages and progress on stderr; quiet on all ranks but rank 0."""

    def __init__(self, *, quiet: bool = False) -> None:
        # FORCE_COLOR does not make a log file a terminal, and Rich draws no bar in a dumb one.
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        self._out = _shared(_Stderr().isatty() and not dumb)
        self._quiet = quiet
        self._progress: Progress | None = None
        self._last_line = -_LINE_SECONDS
        self._total, self._unit = 0, ""

    def say(self, text: str) -> None:
        """Print one line."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}", style="yellow")

    def _print(self, text: str, *, style: str | None = None) -> None:
        if not self._quiet:
            self._out.print(text, style=style, markup=False)

    @property
    def _draws(self) -> bool:
        return self._out.is_terminal and not self._quiet

    @contextlib.contextmanager
    def progress(self, total: int, done: int, unit: str = "step") -> Iterator[None]:
        """Show a bar over ``total`` units while inside."""
        self._total, self._unit = total, unit
        if not self._draws:
            yield
            return
        bar = (BarColumn(20),) if self._out.width >= 110 else ()
        count = TextColumn(unit + " {task.completed:,.0f}/{task.total:,.0f}", markup=False)
        columns = (count, *bar, TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._out, auto_refresh=False) as self._progress:
            self._progress.add_task("", total=total, completed=done)
            try:
                yield
            finally:
                self._progress = None

    @contextlib.contextmanager
    def tally(self, what: str, total: int | None = None) -> Iterator[Tally]:
        """Count work that may take long; shown once it has taken some seconds.

        Args:
            what: the work and its unit, such as "decoding images".
            total: how many units there are, if known.
        """
        with contextlib.ExitStack() as ends:
            yield Tally(self, what, total, ends)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Print what takes a while; in a terminal a spinner turns beside it while inside.

        A thread draws it, so start no process by forking inside.
        """
        if not self._draws:
            self.say(text)
            yield
            return
        with self._out.status(escape(text)):
            yield

    def advance(self, completed: int, text: str, *, place: str = "") -> None:
        """Move the bar; without a terminal print a line, if the last is some seconds old."""
        if self._progress:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=completed, description=text, refresh=True)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or completed >= self._total:
            self._last_line = time.monotonic()
            self.say(f"{self._unit} {completed:,}{place}: {text}")

    def show(self, values: dict[str, Any], *, remaining: int, batch: int) -> None:
        """Show a log point's metrics and the time that the ``remaining`` steps will take."""
        left = remaining * batch / max(values["images_per_second"], 1e-9)
        text = (
            f"loss {values['loss']:.3f}, std {values['z_std']:.2f}, rank {values['rank']:.0f}, "
            f"{values['images_per_second']:,.0f} images/s, data wait {values['data_wait']:.0%}, "
            f"{duration(left)} left"
        )
        self.advance(values["step"], text, place=f" (epoch {values['epoch']:.2f})")


class Tally:
    """Shows the progress of long work: a bar in a terminal, a line every ten seconds in a log.

    Nothing is shown for the first five seconds.

    Args:
        console: where it is shown.
        what: the work and its unit.
        total: how many units there are, if known.
        ends: removes the bar at the end.
    """

    def __init__(
        self, console: Console, what: str, total: int | None, ends: contextlib.ExitStack
    ) -> None:
        self._console, self._what, self._total, self._ends = console, what, total, ends
        self._began = time.monotonic()
        self._next = self._began + _LONG_SECONDS
        self._bar: Progress | None = None
        self.done = 0
        """Units that are done."""

    def add(self, count: int = 1) -> None:
        """Count units that were done."""
        self.done += count
        if (now := time.monotonic()) >= self._next and not self._console._quiet:
            self._show(now)

    def _show(self, now: float) -> None:
        speed = self.done / (now - self._began)
        text = f"{self._what}: {self.done:,}"
        if self._total is None:
            text += f", {speed:,.0f}/s"
        else:
            left = max(0, self._total - self.done) / max(speed, 1e-9)
            text += f" of {self._total:,}, {speed:,.0f}/s, {duration(left)} left"
        if not self._console._draws:
            self._next = now + _LINE_SECONDS
            self._console.say(text)
            return
        self._next = now + _DRAW_SECONDS
        if self._bar is None:
            columns = TextColumn("{task.description}", markup=False), BarColumn(20)
            out = self._console._out
            self._bar = Progress(*columns, console=out, auto_refresh=False, transient=True)
            self._bar.add_task("", total=self._total)
            self._ends.enter_context(self._bar)
        self._bar.update(self._bar.task_ids[0], completed=self.done, description=text, refresh=True)


def tally(what: str, total: int | None = None) -> contextlib.AbstractContextManager[Tally]:
    """Count work as ``Console.tally`` does; quiet if the program's log messages are."""
    logs = logging.getLogger("fastsiam").isEnabledFor(logging.INFO)
    return Console(quiet=not logs).tally(what, total)


class FileProgress:
    """Shows the progress of work on one file after the other: images/s, MB/s, time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = contextlib.ExitStack()

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.say(text)

    def begin(self, name: str, images: int, size: int) -> None:
        """Start with a file of so many images and bytes."""
        self._bar.close()
        self._images, self._size, self._start = images, size, (-1, -1, time.monotonic())
        self._bar.enter_context(self._console.progress(images, 0, f"{name}: image"))

    def progress(self, images: int, size: int) -> None:
        """Show how many images and bytes are done; the first call says where the work started."""
        if self._start[0] < 0:
            self._start = (images, size, time.monotonic())
            return
        first, first_size, began = self._start
        seconds = max(time.monotonic() - began, 1e-9)
        if seconds < _SETTLED_SECONDS and images < self._images:
            return
        speed = (size - first_size) / seconds
        left = (self._size - size) / speed if speed else 0.0
        self._console.advance(
            images,
            f"{(images - first) / seconds:,.0f} images/s, {speed / 1e6:,.0f} MB/s, "
            f"{duration(max(left, 0.0))} left",
            place=f" of {self._images:,}",
        )

    def end(self) -> None:
        """Remove the bar."""
        self._bar.close()


def duration(seconds: float) -> str:
    """Format a time: 42 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def pace(images_per_second: float, images: float) -> str:
    """Format a speed and how long so many images will take: 1,234 images/s, 3 min left."""
    left = duration(images / max(images_per_second, 1e-9))
    digits = 1 if images_per_second < 10 else 0
    return f"{images_per_second:,.{digits}f} images/s, {left} left"


def rounded(value: float) -> str:
    """Format a number with at most two decimals: 24, 7.17."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def counted(number: float, what: str) -> str:
    """Format a count: 1 epoch, 24 epochs, 7.17 epochs."""
    text = rounded(number)
    return f"{text} {what}{'' if text == '1' else 's'}"


def size(count: float) -> str:
    """Format an amount of memory: 154 MB, 6.2 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            number = count / size
            return f"{number:,.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
    return f"{count / 1e3:,.0f} kB"
