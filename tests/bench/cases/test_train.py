"""Training is timed in steps whose batches arrive no faster than they are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench.cases import train
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.pipelines.backends import BASELINE


@pytest.mark.parametrize("workers", [1, 32])
def test_training_outlasts_prefetched_batches(
    workers: int, bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a fast GPU and torchvision workers that prefetch two batches each."""
    monkeypatch.setattr(train, "compare", lambda _, rows: rows)
    config = replace(
        bench_config, crop=224, batch=2, images=0, workers=workers, pipelines=("native",)
    )
    with session(config) as bench_session:  # large views need fewer images
        bench_session.device = "cuda"
        rows: dict[str, Any] = {row.name: row for row in train.measure(bench_session)}
        data = rows[BASELINE].build.keywords["config"].data
        batches = sum(path.is_file() for path in Path(data.data).rglob("*")) // 2
    warm, steps = train.window(12, batches, data, whole=True)

    free = [0.0] * workers  # when each worker is free; a batch takes one second
    requested, ends = [0.0] * 2 * workers, [0.0]
    for number in range(warm + steps):
        own_worker = number % workers
        free[own_worker] = max(free[own_worker], requested[number]) + 1
        requested.append(max(ends[-1], free[own_worker]))
        ends.append(requested[-1] + 0.01)
    assert steps / (ends[-1] - ends[warm]) <= 1.01 * workers


def test_pipelines_train_on_stored_form(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "compare", lambda _, rows: rows)
    with session(
        replace(bench_config, pipelines=("native",), stored=("short256",))
    ) as bench_session:
        rows: dict[str, Any] = {row.name: row for row in train.measure(bench_session)}
    assert list(rows) == ["synthetic", "torchvision", "native, short256"]
    data = rows["native, short256"].build.keywords["config"].data
    assert data.pipeline == "native" and data.data.endswith("-short256")
