"""How things are timed: the same work in turns (A B C A B C ...), medians with their spread."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Timing:
    """Repeats of one piece of work."""

    wall: list[float] = field(default_factory=list)
    """Seconds by the clock, of each repeat."""
    cpu: list[float] = field(default_factory=list)
    """Seconds of processor time, child processes included, of each repeat."""

    @property
    def median(self) -> float:
        """Median of the wall-clock seconds."""
        return statistics.median(self.wall)

    @property
    def spread(self) -> float:
        """Half the distance between the fastest and the slowest repeat, over the median."""
        return (max(self.wall) - min(self.wall)) / 2 / self.median


def in_turns(
    work: Mapping[str, Callable[[], None]], *, repeats: int, before: Callable[[], None]
) -> dict[str, Timing]:
    """Time several pieces of work, one after the other, again and again.

    Args:
        work: by name; each does the same amount every time.
        repeats: how often each is timed, after one round that is not.
        before: is called before each, outside of the clock, to clean up.

    Returns:
        The timings by name.
    """
    timings = {name: Timing() for name in work}
    for turn in range(-1, repeats):
        for name, run in work.items():
            before()
            cpu, wall = cpu_seconds(), time.perf_counter()
            run()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if turn >= 0:
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    return timings


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children, dead and alive."""
    now = os.times()
    ended = now.user + now.system + now.children_user + now.children_system
    return ended + sum(_cpu_of(child) for child in _children(os.getpid()))


def _children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found + [grandchild for child in found for grandchild in _children(child)]


def _cpu_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
