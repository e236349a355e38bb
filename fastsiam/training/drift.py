"""Whether a figure of a run drifts: rises or falls for hours, beyond what noise does.

A run of a week has tens of thousands of log points. They are gathered into windows, of which the
whole run never has more than 64: when there are as many, neighbours become one. So noise of minutes
weighs less and less, a drift of days is seen as well as one of an hour, and there is something to
look at a few hundred times a week instead of at each log point.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_POINTS = 16
"""Log points of a window, at least: their median is no outlier's."""
_SECONDS = 60.0
"""Training time of a window, at least."""
_MOST, _FEWEST = 64, 24
"""Windows at most, and from how many on they are judged."""
_TREND = 0.4
"""Kendall's tau from which on windows are said to rise: 1 if each is above all before it, 0.5 if
the second half is above the first, 0 on average where there is no trend."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some log points together."""

    begin: float
    """Epochs done at the first."""
    end: float
    """Epochs done at the last."""
    seconds: float
    """Training time at the last."""
    value: float
    """Median of the figure."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How a figure moved: its median over the first quarter of the windows, and over the last."""

    then: float
    now: float
    since: tuple[float, float]
    """Epochs of the first quarter, from and to."""
    until: tuple[float, float]
    """Epochs of the last quarter."""
    per_second: float
    """How fast it moves: the median slope between windows of the last third (Theil and Sen)."""
    goes_on: bool
    """Whether it still moves so: at half of the speed that it had on the whole, or faster."""


@dataclass(slots=True)
class Series:
    """A figure of a run over time, in windows.

    The first window is left out: in it kernels are compiled and caches are cold.
    """

    windows: list[Window] = field(default_factory=list)
    _points: list[tuple[float, float, float]] = field(default_factory=list)
    _begun: float | None = None
    _parts: list[Window] = field(default_factory=list)
    _of_each: int = 1
    _is_warm: bool = False

    def note(self, *, epoch: float, seconds: float, value: float) -> bool:
        """Note a log point; tell whether a window is complete, so that it is time to judge.

        Args:
            epoch: epochs done.
            seconds: training time of the run.
            value: of the figure.
        """
        if self._begun is None:
            self._begun = seconds
        self._points.append((epoch, seconds, value))
        if len(self._points) < _POINTS or seconds - self._begun < _SECONDS:
            return False
        epochs, times, found = zip(*self._points, strict=True)
        window = Window(epochs[0], epochs[-1], times[-1], float(np.median(found)))
        self._points, self._begun = [], seconds
        if not self._is_warm:
            self._is_warm = True
            return False
        self._parts.append(window)
        if len(self._parts) < self._of_each:
            return False
        self.windows.append(_merged(self._parts))
        self._parts = []
        if len(self.windows) == _MOST:
            pairs = zip(self.windows[::2], self.windows[1::2], strict=True)
            self.windows = [_merged(pair) for pair in pairs]
            self._of_each *= 2
        return True

    def drift(self, *, rises: bool) -> Drift | None:
        """Return how the figure moved, if it did: see ``is_drift``.

        Args:
            rises: whether to look for a rise, else for a fall.
        """
        if len(self.windows) < _FEWEST:
            return None
        values = np.array([window.value for window in self.windows])
        if not is_drift(values if rises else -values).item():
            return None
        quarter, third = len(values) // 4, len(values) // 3
        first, last = self.windows[:quarter], self.windows[-quarter:]
        times = np.array([window.seconds for window in self.windows])
        lately = _slope(times[-third:], values[-third:])
        whole = _slope(times, values)
        return Drift(
            then=float(np.median(values[:quarter])),
            now=float(np.median(values[-quarter:])),
            since=(first[0].begin, first[-1].end),
            until=(last[0].begin, last[-1].end),
            per_second=lately,
            goes_on=lately / whole >= 0.5 if whole else False,
        )


def is_drift(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell whether series rise.

    A series does whose last quarter lies above its first as a whole, and whose windows follow that
    trend in between by Kendall's tau, the measure of Mann's test. A level that is reached and kept
    counts as well as a rise that goes on; a peak that is over does not.

    Args:
        values: (..., windows).

    Returns:
        (...,).
    """
    count = values.shape[-1]
    quarter = count // 4
    apart = values[..., -quarter:].min(-1) > values[..., :quarter].max(-1)
    earlier, later = np.triu_indices(count, 1)
    tau: NDArray[np.float64] = np.sign(values[..., later] - values[..., earlier]).mean(-1)
    found: NDArray[np.bool_] = apart & (tau >= _TREND)
    return found


def _merged(parts: list[Window] | tuple[Window, Window]) -> Window:
    first, last = parts[0], parts[-1]
    value = float(np.median([part.value for part in parts]))
    return Window(first.begin, last.end, last.seconds, value)


def _slope(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    earlier, later = np.triu_indices(len(times), 1)
    rises = (values[later] - values[earlier]) / (times[later] - times[earlier])
    return float(np.median(rises))
