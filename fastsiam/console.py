"""What a person sees while a run goes on: a progress bar in a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn

_LINE_SECONDS = 10.0
"""Without a terminal, at most one progress line in so many seconds."""

_SETTLED_SECONDS = 2.0
"""Speeds over less time say little."""


class Console:
    """Progress and messages of one run, on stderr; quiet on all ranks but the first."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = RichConsole(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._last_line = -_LINE_SECONDS
        self._total, self._unit = 0, ""

    def say(self, text: str) -> None:
        """Print one line."""
        self._out.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print one line that should not be missed."""
        self._out.print(f"warning: {text}", style="yellow", markup=False)

    @contextlib.contextmanager
    def progress(self, total: int, done: int, unit: str = "step") -> Iterator[None]:
        """Show a bar over ``total`` units while inside."""
        self._total, self._unit = total, unit
        if not self._out.is_terminal or self._out.quiet:
            yield
            return
        bar = (BarColumn(20),) if self._out.width >= 110 else ()
        count = TextColumn(unit + " {task.completed:,.0f}/{task.total:,.0f}")
        columns = (count, *bar, TextColumn("{task.description}"))
        # No refresh thread: loaders fork, and a lock that it holds then stays locked in the child.
        with Progress(*columns, console=self._out, auto_refresh=False) as self._progress:
            self._progress.add_task("", total=total, completed=done)
            yield
        self._progress = None

    def advance(self, completed: int, text: str, *, place: str = "") -> None:
        """Move the bar; without a terminal print a line, if the last is some seconds old."""
        if self._progress:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=completed, description=text, refresh=True)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or completed >= self._total:
            self._last_line = time.monotonic()
            self.say(f"{self._unit} {completed:,}{place}: {text}")

    def show(self, values: dict[str, Any], *, remaining: int, batch: int) -> None:
        """Show a log point's metrics and the time ``remaining`` steps will take at this speed."""
        left = remaining * batch / max(values["images_per_second"], 1e-9)
        text = (
            f"loss {values['loss']:.3f}, std {values['z_std']:.2f}, rank {values['rank']:.0f}, "
            f"{values['images_per_second']:,.0f} images/s, data wait {values['data_wait']:.0%}, "
            f"{duration(left)} left"
        )
        self.advance(values["step"], text, place=f" (epoch {values['epoch']:.2f})")


class FileProgress:
    """Shows how the work on one file after the other goes on: images/s, MB/s, time left."""

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
        """Tell how many images and bytes of it are done; the first call says where work began."""
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
        """Take the bar away."""
        self._bar.close()


def duration(seconds: float) -> str:
    """Write a time for people: 42 s, 3 min, 2 h 05 min, 3 d 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 36:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def rounded(value: float) -> str:
    """Write a number for people, with two decimals at most: 24, 7.17."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
