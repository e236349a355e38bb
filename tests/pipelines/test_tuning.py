"""The tuner chooses a loader's number of threads by timing the training loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastsiam.pipelines.tuning import WorkerTuner


def run_tuner(most: int, period: Callable[[int], float]) -> WorkerTuner:
    """Return a tuner after 100 batches; ``period`` maps its threads to seconds per batch."""
    tuner, now = WorkerTuner(most), 0.0
    for number in range(100):
        tuner.note_batch(now)
        now += period(tuner.workers) * (1 + 0.01 * (number % 3))  # a noisy clock
    return tuner


@pytest.mark.parametrize(
    ("most", "period", "chosen"),
    [
        (16, lambda workers: max(0.1, 0.5 / workers), 6),  # five keep up with the step
        (16, lambda workers: 1 / workers, 16),  # the loader is the bottleneck
        (16, lambda workers: 0.1 + 0.02 * workers, 2),  # threads take cores from training
        (2, lambda workers: 0.1, 1),
        (1, lambda workers: 0.1, 1),
    ],
)
def test_tuner_finds_fewest_sufficient_threads(
    most: int, period: Callable[[int], float], chosen: int
) -> None:
    tuner = run_tuner(most, period)
    assert tuner.is_done and tuner.workers == chosen
    assert f"loader threads: {chosen};" in str(tuner)


def test_tuner_ignores_pauses_between_epochs() -> None:
    tuner, now = WorkerTuner(4), 0.0
    for number in range(100):
        if number % 7 == 0:
            tuner.pause()
            now += 1000
        tuner.note_batch(now)
        now += 0.1 if tuner.workers >= 2 else 0.2
    assert tuner.is_done and tuner.workers == 2
