"""Search for the number of loader threads, during the first batches of a run.

Decoding threads compete for CPU cores: with training on a CPU, or with the process that feeds a
GPU. Using the fewest threads that do not slow training down leaves the most cores to other work.
The number of threads does not change the batches.
"""

from __future__ import annotations

import time
from statistics import median

_SKIPPED = 4
"""Batches after a change that are not timed, because the previous threads made some of them."""
_TIMED = 10
"""Batches that are timed for each number of threads."""
_SLOWER = 1.03
"""Step times up to this multiple of the fastest count as equally fast."""


class WorkerTuner:
    """Finds the fewest threads with which a training loop runs at full speed.

    It starts with ``most`` threads and tries fewer until the loop becomes slower. This takes fewer
    than a hundred batches.
    """

    def __init__(self, most: int) -> None:
        self.workers = most
        """Threads to use from now on."""
        self._untried = thread_counts(most)[1:]
        self._times: dict[int, float] = {}
        self._periods: list[float] = []
        self._last: float | None = None
        self.is_done = False
        """Whether the number of threads is final."""

    def note_batch(self) -> None:
        """Record that the loop asks for a batch, and update ``workers`` and ``is_done``."""
        now = time.perf_counter()
        if self._last is not None:
            self._periods.append(now - self._last)
        self._last = now
        if self.is_done or len(self._periods) < _SKIPPED + _TIMED:
            return
        self._times[self.workers] = median(self._periods[_SKIPPED:])
        self._periods.clear()
        time_limit = _SLOWER * min(self._times.values())
        if self._times[self.workers] <= time_limit and self._untried:
            self.workers = self._untried.pop(0)
        else:
            self.is_done = True
            self.workers = min(count for count, t in self._times.items() if t <= time_limit)

    def pause(self) -> None:
        """Record that the loop pauses, such as between epochs; the pause is not timed."""
        self._last = None

    def __str__(self) -> str:
        """Return a log message with the step times and the choice."""
        times = ", ".join(f"{count}: {1000 * t:.3g} ms" for count, t in self._times.items())
        return f"loader threads: {self.workers}; step time with each number: {times}"


def thread_counts(most: int) -> list[int]:
    """Return at most six numbers of threads to try, largest first."""
    shares = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
    return list(dict.fromkeys(max(1, round(share * most)) for share in shares))
