"""How fast a run is: images a second, and the share of its time spent waiting for data."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")

_TIMED_SECONDS = 10.0
"""Steps are timed for so long before a run says how long it will take."""


class Clock:
    """Times the steps since the last reading and the part of them spent waiting for data.

    On a CPU that part is the time that the loop spends in the loader. On a GPU it is the time by
    the GPU's own clock between the end of a step's work and the moment when the next batch is
    ready there: the GPU stands still for want of data, or finishes the batch (its copy, what of the
    augmentation runs in the training's stream). How long the host is in the loader would say
    nothing there: with the GPU's queue full, its launches block until steps are done.

    Args:
        seconds: training time so far.
        device: what trains.
    """

    def __init__(self, seconds: float = 0.0, *, device: torch.device | str = "cpu") -> None:
        self.seconds = seconds
        """Training time of the whole run, pauses left out."""
        self._begun: float | None = None
        self._elapsed = 0.0
        self._steps = 0
        self._device = torch.device(device)
        self._waits: _Waits = _DeviceWaits() if self._device.type == "cuda" else _HostWaits()

    @property
    def running(self) -> float:
        """Seconds since ``resume``; 0 while the clock stands still."""
        return 0.0 if self._begun is None else time.perf_counter() - self._begun

    @property
    def now(self) -> float:
        """Training time of the whole run up to this moment, in seconds."""
        return self.seconds + self.running

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, timing how long each one keeps us waiting; call it running.

        On a GPU neither this nor the steps wait for it: two events are recorded for each.
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
        """Stop counting until ``resume``: what follows is not training.

        Args:
            after_steps: first wait for a GPU that is still at work on the steps.
        """
        if after_steps and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._begun is not None:
            elapsed = time.perf_counter() - self._begun
            self._elapsed += elapsed
            self.seconds += elapsed
            self._begun = None

    def resume(self) -> None:
        """Count, at the beginning and after each pause."""
        self._begun = time.perf_counter()

    def read(self, images_per_step: int) -> dict[str, float]:
        """Return speed, share of waiting and total time; start a new interval.

        Call it paused, when the steps' work is done: on a GPU it waits for the last batch.
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


class Forecast:
    """Times the first steps once, to say how long a run will take.

    The very first step is left out, because it compiles and reads ahead. Nothing waits for a
    device: on a GPU the host is ahead by what its queue holds, a small part of the time.

    Args:
        clock: the run's; it stands still while nothing is trained.
        last: the step at which the time has to be known, however short it was.
    """

    def __init__(self, clock: Clock, *, last: int) -> None:
        self._clock, self._last = clock, last
        self._began: float | None = None
        self._steps = 0
        self._told = False

    def note(self, done: int) -> float | None:
        """Note that a step is taken; return the seconds of a step, the one time they are known.

        Args:
            done: steps done so far.
        """
        if self._told:
            return None
        if self._began is None:
            self._began = self._clock.now
            return None
        self._steps += 1
        elapsed = self._clock.now - self._began
        if elapsed < _TIMED_SECONDS and done < self._last:
            return None
        self._told = True
        return elapsed / self._steps


class _Waits(Protocol):
    """Adds up how long batches keep a device waiting."""

    def begin(self) -> None:
        """The steps before are under way, and the next batch is asked for."""

    def end(self) -> None:
        """It is handed over."""

    def total(self) -> float:
        """Return the seconds since the last call."""


class _HostWaits:
    """By the host's clock, where the host does the work."""

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
    """By the GPU's clock, which both events of a wait read when the current stream reaches them."""

    def __init__(self) -> None:
        self._began = _cuda_event()
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Those that the GPU may not have come to yet: as many as steps are in its queue."""
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
