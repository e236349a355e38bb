"""Alarms: what goes slowly wrong in a run of days, each said once and with its figures.

Rank 0 looks at its log points: at its speed, its wait for data, and the vitals of its process and
machine. What drifts is found by ``drift``; what is nearly used up, or a GPU that is slowed down, by
thresholds. A run that is resumed says an alarm again only if it got worse meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastsiam.console import duration, rounded, size
from fastsiam.training.drift import Drift, Series
from fastsiam.training.vitals import Vitals

_SLOWER = 0.88
"""images/s that are so much of what they were are a fall. Of simulated weeks whose speed has no
trend (windows of 5 minutes, standard deviation 5%, correlated over up to 8 hours) 12% at most fall
so far by chance; with 3%, one in 300 (``tests/training/test_alarms.py``)."""
_WAITS_MORE = 0.1
"""By so much of a step's time the wait for data grows."""
_MORE_MEMORY, _MORE_BYTES = 1.05, 256 * 2**20
"""A climb of memory is at least so much of it, and so many bytes."""
_MORE_FILES = 50
"""Open files more than there were."""
_NEARLY = 0.9
"""Of open files or shared memory."""
_CHECKPOINTS = 2
"""There should be room for so many: one is written beside the one before."""
_THROTTLE_POINTS = 40
"""Log points that are looked back at for a GPU that is slowed down at half of them."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that goes wrong, with its figures."""

    name: str
    step: int
    epoch: float
    now: float
    """The figure, which is worse if it is larger: for one that falls, it is negative."""
    text: str

    def record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "name": self.name,
            "now": self.now,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class _Watched:
    """A figure that is watched for a drift."""

    name: str
    rises: bool
    enough: Callable[[float, float], bool]
    """Tells of then and now whether that is worth a word."""
    say: Callable[[Drift, Vitals], str]
    stays: bool = True
    """Whether a level that is reached and kept is an alarm too, not only one that still moves."""


class Alarms:
    """Watches the log points of a run.

    Args:
        earlier: the alarms of the run so far, as they were recorded.
    """

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._series = {watched.name: Series() for watched in _WATCHED}
        self._before: dict[str, float] = {}
        for line in earlier:
            self._before[line["name"]] = line["now"]
        self._said: set[str] = set()
        self._throttled: deque[tuple[str, ...]] = deque(maxlen=_THROTTLE_POINTS)

    def note(self, values: Mapping[str, Any], vitals: Vitals) -> list[Alarm]:
        """Note a log point; return the alarms that are new.

        Args:
            values: of the point, as they are logged: step, epoch, seconds, images_per_second,
                data_wait.
            vitals: read at it.
        """
        found = [*self._drifts(values, vitals), *self._scarce(vitals), *self._slowed(vitals)]
        fresh = []
        for name, now, text in found:
            if name in self._said:
                continue
            if name not in self._before or _is_worse(name, self._before[name], now):
                self._said.add(name)
                fresh.append(Alarm(name, values["step"], values["epoch"], now, text))
        return fresh

    def _drifts(
        self, values: Mapping[str, Any], vitals: Vitals
    ) -> Iterable[tuple[str, float, str]]:
        figures = {**values, "memory": vitals.memory, "files": vitals.files}
        for watched in _WATCHED:
            figure, series = figures[watched.name], self._series[watched.name]
            if figure is None:
                continue
            point = {"epoch": values["epoch"], "seconds": values["seconds"]}
            if not series.note(**point, value=float(figure)):
                continue
            drift = series.drift(rises=watched.rises)
            if drift is None or not watched.enough(drift.then, drift.now):
                continue
            if watched.stays or drift.goes_on:
                now = drift.now if watched.rises else -drift.now
                yield watched.name, now, watched.say(drift, vitals)

    def _scarce(self, vitals: Vitals) -> Iterable[tuple[str, float, str]]:
        files, limit = vitals.files, vitals.files_limit
        if files is not None and limit and files > _NEARLY * limit:
            text = f"{files:,} files are open, of {limit:,} that may be (ulimit -n)"
            yield "files_limit", files / limit, text
        free = vitals.disk_free
        if free is not None and free < _CHECKPOINTS * vitals.checkpoint:
            yield (
                "disk",
                -free,
                f"the run's disk has {size(free)} left; a checkpoint takes "
                f"{size(vitals.checkpoint)}, and the one before stays until it is written",
            )
        free = vitals.shared_free
        if free is not None and vitals.shared and free < (1 - _NEARLY) * vitals.shared:
            yield (
                "shared_memory",
                -free,
                f"/dev/shm has {size(free)} of {size(vitals.shared)} left; when it is full, loader "
                "processes are killed by SIGBUS",
            )

    def _slowed(self, vitals: Vitals) -> Iterable[tuple[str, float, str]]:
        if vitals.gpu is None:
            return
        self._throttled.append(vitals.gpu.throttles)
        points = [why for why in self._throttled if why]
        if len(self._throttled) == _THROTTLE_POINTS and 2 * len(points) >= _THROTTLE_POINTS:
            reasons = ", ".join(sorted({reason for why in points for reason in why}))
            yield (
                "gpu",
                vitals.gpu.celsius,
                f"the GPU is slowed down ({reasons}) at {len(points)} of the last "
                f"{_THROTTLE_POINTS} log points: {vitals.gpu}",
            )


def _is_worse(name: str, before: float, now: float) -> bool:
    """Tell whether an alarm's figure is worth another word after one that was said."""
    for watched in _WATCHED:
        if watched.name == name:
            return watched.enough(abs(before), abs(now)) and now > before
    return now > before


def _say_speed(drift: Drift, _: Vitals) -> str:
    return (
        f"images/s fell from {drift.then:,.0f} (median of {_epochs(drift.since)}) to "
        f"{drift.now:,.0f} ({_epochs(drift.until)}), by {1 - drift.now / drift.then:.0%}"
    )


def _say_wait(drift: Drift, _: Vitals) -> str:
    return (
        f"data wait grew from {drift.then:.0%} (median of {_epochs(drift.since)}) to "
        f"{drift.now:.0%} ({_epochs(drift.until)}): the loader became slower"
    )


def _say_memory(drift: Drift, vitals: Vitals) -> str:
    return (
        f"memory of the run's processes climbs: from {size(drift.then)} ({_epochs(drift.since)}) "
        f"to {size(drift.now)} ({_epochs(drift.until)}), {size(3600 * drift.per_second)} an hour"
        f"{_full(drift, vitals.memory_limit, size)}"
    )


def _say_files(drift: Drift, vitals: Vitals) -> str:
    return (
        f"open files climb: from {drift.then:,.0f} ({_epochs(drift.since)}) to {drift.now:,.0f} "
        f"({_epochs(drift.until)}){_full(drift, vitals.files_limit, lambda n: f'{n:,.0f}')}"
    )


def _full(drift: Drift, limit: int | None, say: Callable[[float], str]) -> str:
    """Say when a climb reaches its limit, if it goes on so."""
    if limit is None or drift.per_second <= 0:
        return ""
    left = max(0.0, limit - drift.now) / drift.per_second
    return f"; so all {say(limit)} are full after {duration(left)} more"


def _epochs(span: tuple[float, float]) -> str:
    first, last = map(rounded, span)
    return f"epoch {first}" if first == last else f"epochs {first} to {last}"


_WATCHED = (
    _Watched(
        "images_per_second",
        rises=False,
        enough=lambda then, now: now <= _SLOWER * then,
        say=_say_speed,
    ),
    _Watched(
        "data_wait",
        rises=True,
        enough=lambda then, now: now - then >= _WAITS_MORE,
        say=_say_wait,
    ),
    _Watched(
        "memory",
        rises=True,
        enough=lambda then, now: now >= _MORE_MEMORY * then and now - then >= _MORE_BYTES,
        say=_say_memory,
        stays=False,
    ),
    _Watched(
        "files",
        rises=True,
        enough=lambda then, now: now - then >= _MORE_FILES,
        say=_say_files,
        stays=False,
    ),
)
