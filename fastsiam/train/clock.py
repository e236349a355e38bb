"""Speed of a run: images per second, and the share of time spent waiting for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Clock:
    """Times the steps since the last reading and the part of them spent waiting for data.

    On a CPU, waiting is the time that the loop spends in the loader. On a GPU, it is the time
    between the end of a step's work and the moment the next batch is ready, measured with CUDA
    events: the GPU is idle, or it copies and augments the batch in the training stream. The host's
    time in the loader is meaningless there, because launches block while the GPU's queue is full.

    Args:
        seconds: training time so far.
        device: the device that trains.
    """

    def __init__(self, seconds: float = 0.0, *, device: torch.device | str = "cpu") -> None:
        self.seconds = seconds
        """Training time of the whole run, without pauses."""
        self._started: float | None = None
        self._elapsed = 0.0
        self._steps = 0
        self._device = torch.device(device)
        self._waits: _Waits = _DeviceWaits() if self._device.type == "cuda" else _HostWaits()

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches and time the wait for each; the clock must be running.

        On a GPU this does not synchronise: it records two events for each batch.
        """
        iterator = iter(batches)
        while True:
            self._waits.begin()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                self._waits.end()
            self._steps += 1
            yield batch

    def pause(self, *, after_steps: bool = False) -> None:
        """Stop the clock until ``resume``.

        Args:
            after_steps: first wait until the GPU has finished the steps.
        """
        if after_steps and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._started is not None:
            elapsed = time.perf_counter() - self._started
            self._elapsed += elapsed
            self.seconds += elapsed
            self._started = None

    def resume(self) -> None:
        """Start the clock, at the beginning and after each pause."""
        self._started = time.perf_counter()

    def read(self, images_per_step: int) -> dict[str, float]:
        """Return speed, share of waiting and total time; start a new interval.

        The clock must be paused and the steps finished. On a GPU this waits for the last batch.
        """
        elapsed = max(self._elapsed, 1e-9)
        reading = {
            "images_per_second": self._steps * images_per_step / elapsed,
            "data_wait": min(1.0, self._waits.total() / elapsed),
            "seconds": self.seconds,
        }
        self._elapsed = 0.0
        self._steps = 0
        return reading


class _Waits(Protocol):
    """Adds up how long a device waits for batches."""

    def begin(self) -> None:
        """Start timing: the earlier steps are queued, and the next batch is requested."""

    def end(self) -> None:
        """Stop timing: the batch has arrived."""

    def total(self) -> float:
        """Return the seconds since the last call."""


class _HostWaits:
    """Waits measured by the host's clock, for training on a CPU."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._seconds += time.perf_counter() - self._began

    def total(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class _DeviceWaits:
    """Waits measured by pairs of CUDA events in the current stream."""

    def __init__(self) -> None:
        self._began = _cuda_event()
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Pairs that the GPU may not have reached yet, at most one for each queued step."""
        self._seconds = 0.0

    def begin(self) -> None:
        self._began = _cuda_event()
        self._began.record()

    def end(self) -> None:
        ended = _cuda_event()
        ended.record()
        self._pairs.append((self._began, ended))
        while self._pairs and self._pairs[0][1].query():
            self._add()

    def total(self) -> float:
        while self._pairs:
            self._pairs[0][1].synchronize()
            self._add()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self) -> None:
        began, ended = self._pairs.popleft()
        self._seconds += began.elapsed_time(ended) / 1000  # of milliseconds
