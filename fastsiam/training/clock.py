"""How fast a run is: images a second, and the share of its time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """Times the steps since the last reading and the part of them spent waiting for data."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        """Training time of the whole run, pauses left out."""
        self._begun: float | None = None
        self._waited = self._elapsed = 0.0
        self._steps = 0

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, timing how long each one keeps us waiting."""
        self._begun = time.perf_counter()
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                self._waited += time.perf_counter() - asked
            self._steps += 1
            yield batch
        self.pause()

    def pause(self) -> None:
        """Stop counting until ``resume``: what follows is not training."""
        if self._begun is not None:
            elapsed = time.perf_counter() - self._begun
            self._elapsed += elapsed
            self.seconds += elapsed
            self._begun = None

    def resume(self) -> None:
        """Count again."""
        self._begun = time.perf_counter()

    def read(self, images_per_step: int) -> dict[str, float]:
        """Return speed, share of waiting and total time; start a new interval. Call it paused."""
        elapsed = max(self._elapsed, 1e-9)
        reading = {
            "images_per_second": self._steps * images_per_step / elapsed,
            "data_wait": min(1.0, self._waited / elapsed),
            "seconds": self.seconds,
        }
        self._waited = self._elapsed = 0.0
        self._steps = 0
        return reading
