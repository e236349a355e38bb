"""Speed of a run: images per second, and the fraction of time spent waiting for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Clock:
    """Clock of the steps since the last reading, and of the time they spent waiting for data.

    On a CPU, waiting is the time that the loop spends in the loader. On a GPU, it is the time
    between the end of a step's work and the moment the next batch is ready, measured with CUDA
    events. In that time the GPU is idle, or copies and augments the batch in the training stream.
    The host's time in the loader means nothing there: launches block while the GPU's queue is full.

    Args:
        seconds: training time so far.
        device: the training device.
    """

    def __init__(self, seconds: float = 0.0, *, device: torch.device | str = "cpu") -> None:
        self.seconds = seconds
        """Training time of the entire run, without pauses."""
        self._started: float | None = None
        self._elapsed = 0.0
        self._steps = 0
        self._device = torch.device(device)
        self._waited = 0.0
        self._waits: deque[tuple[Any, Any]] = deque()
        """Start and end events of the waits that the GPU may not have reached yet."""

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches and time the wait for each; the clock must be running.

        This does not synchronise with a GPU: it records two events for each batch.
        """
        iterator = iter(batches)
        while True:
            start = self._event()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                self._waits.append((start, self._event()))
                while self._waits and self._waits[0][1].query():
                    self._add_wait()
            self._steps += 1
            yield batch

    def pause(self, *, after_steps: bool = False) -> None:
        """Stop the clock until ``resume``; with ``after_steps``, wait for the GPU's steps first."""
        if after_steps and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._started is not None:
            elapsed = time.perf_counter() - self._started
            self._elapsed += elapsed
            self.seconds += elapsed
            self._started = None

    def resume(self) -> None:
        """Start the clock, unless it is running."""
        if self._started is None:
            self._started = time.perf_counter()

    def read(self, images_per_step: int) -> dict[str, float]:
        """Return speed, fraction of time spent waiting and total time; start a new interval.

        The clock must be paused and the steps finished. On a GPU this waits for the last batch.
        """
        while self._waits:
            self._waits[0][1].synchronize()
            self._add_wait()
        elapsed = max(self._elapsed, 1e-9)
        reading = {
            "images_per_second": self._steps * images_per_step / elapsed,
            "data_wait": min(1.0, self._waited / elapsed),
            "seconds": self.seconds,
        }
        self._elapsed = self._waited = 0.0
        self._steps = 0
        return reading

    def _event(self) -> Any:
        """Record an event on the GPU's current stream, or on the host, and return it."""
        event = _cuda_event() if self._device.type == "cuda" else _HostEvent()
        event.record()
        return event

    def _add_wait(self) -> None:
        start, end = self._waits.popleft()
        self._waited += start.elapsed_time(end) / 1000  # ms to s


class _HostEvent:
    """A point in time on the host, with the interface of ``torch.cuda.Event``."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1000 * (later._time - self._time)


def _cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
