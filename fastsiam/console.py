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


class Console:
    """Progress and messages of one run, on stderr; quiet on all ranks but the first."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._out = RichConsole(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._last_line = -_LINE_SECONDS

    def say(self, text: str) -> None:
        """Print one line."""
        self._out.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print one line that should not be missed."""
        self._out.print(f"warning: {text}", style="yellow", markup=False)

    @contextlib.contextmanager
    def progress(self, total: int, done: int) -> Iterator[None]:
        """Show a bar over ``total`` steps while inside."""
        if not self._out.is_terminal or self._out.quiet:
            yield
            return
        bar = (BarColumn(20),) if self._out.width >= 110 else ()
        count = TextColumn("step {task.completed:,.0f}/{task.total:,.0f}")
        columns = (count, *bar, TextColumn("{task.description}"))
        # No refresh thread: loaders fork, and a lock that it holds then stays locked in the child.
        with Progress(*columns, console=self._out, auto_refresh=False) as self._progress:
            self._progress.add_task("", total=total, completed=done)
            yield
        self._progress = None

    def show(self, values: dict[str, Any], *, remaining: int, batch: int) -> None:
        """Show a log point's metrics and the time ``remaining`` steps will take at this speed."""
        left = remaining * batch / max(values["images_per_second"], 1e-9)
        text = (
            f"loss {values['loss']:.3f}, std {values['z_std']:.2f}, rank {values['rank']:.0f}, "
            f"{values['images_per_second']:,.0f} images/s, data wait {values['data_wait']:.0%}, "
            f"{duration(left)} left"
        )
        if self._progress:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=values["step"], description=text, refresh=True)
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or remaining == 0:
            self._last_line = time.monotonic()
            self.say(f"step {values['step']:,} (epoch {values['epoch']:.2f}): {text}")


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
