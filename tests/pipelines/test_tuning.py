"""The tuner chooses a loader's number of threads by timing the training loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fastsiam.pipelines import tuning


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize(
    ("most", "period", "chosen"),
    [
        (16, lambda workers: max(0.1, 0.5 / workers), 6),  # five keep up with the step
        (16, lambda workers: 1 / workers, 16),  # the loader is the bottleneck
        (16, lambda workers: 0.1 + 0.02 * workers, 2),  # threads take cores from training
        (4, lambda workers: 0.2 / min(workers, 2), 2),
        (2, lambda workers: 0.1, 1),
        (1, lambda workers: 0.1, 1),
    ],
)
def test_tuner_finds_fewest_sufficient_threads(
    most: int,
    period: Callable[[int], float],
    chosen: int,
    pauses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ``most`` threads; ``period`` maps a number to seconds per batch. Pauses do not count."""
    clock = 0.0
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: clock))
    tuner = tuning.WorkerTuner(most)
    for number in range(200 if pauses else 100):
        if pauses and number % 2 == 0:
            tuner.pause()
            clock += 1000
        tuner.note_batch()
        clock += period(tuner.workers) * (1 + 0.01 * (number % 3))  # a noisy clock
    assert tuner.is_done and tuner.workers == chosen
    assert f"loader threads: {chosen};" in str(tuner)
