"""How many threads a loader needs: found by trying, in the first batches of a run.

Threads that decode compete with training for the cores of a CPU, and on a GPU's host with the
process that feeds it. The fewest threads that do not slow training down leave the most cores to the
rest. The number of threads does not change what is loaded.
"""

from __future__ import annotations

import time
from statistics import median

_SKIPPED = 4
"""Batches after a change that are not timed: earlier numbers of threads made some of them."""
_TIMED = 10
"""Batches that are timed for each number of threads."""
_SLOWER = 1.03
"""Times the fastest: a number of threads that takes no longer counts as equally fast."""


class WorkerTuner:
    """Finds the fewest threads with which a training loop is as fast as with any number.

    It starts with ``most`` threads and tries fewer until the loop becomes slower, within a hundred
    batches.
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

    def note_batch(self, now: float | None = None) -> None:
        """Note that the loop asks for a batch, and choose the number of threads from now on.

        Args:
            now: seconds of a monotonic clock; the current time by default.
        """
        now = time.perf_counter() if now is None else now
        if self._last is not None:
            self._periods.append(now - self._last)
        self._last = now
        if self.is_done or len(self._periods) < _SKIPPED + _TIMED:
            return
        self._times[self.workers] = median(self._periods[_SKIPPED:])
        self._periods.clear()
        enough = _SLOWER * min(self._times.values())
        if self._times[self.workers] <= enough and self._untried:
            self.workers = self._untried.pop(0)
        else:
            self.is_done = True
            self.workers = min(count for count, t in self._times.items() if t <= enough)

    def pause(self) -> None:
        """Note that the loop stops for a while, as between epochs: that time does not count."""
        self._last = None

    def __str__(self) -> str:
        """Return one line about what was tried and chosen."""
        tried = ", ".join(f"{count}: {1000 * t:.3g} ms" for count, t in self._times.items())
        return f"loader threads: {self.workers}; time of a step with each number: {tried}"


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads to try, the largest first: six at most."""
    shares = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8)
    return list(dict.fromkeys(max(1, round(share * most)) for share in shares))
