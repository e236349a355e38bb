"""Startup is measured in new processes; a start is cold only if the files were not cached."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastsiam.bench import runner
from fastsiam.bench.cases import CASES, startup
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measure import children
from fastsiam.bench.session import session


def test_files_still_in_page_cache_are_not_cold(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    still_cached = iter([0.05, 0.06])
    dropped: set[Path] = set()

    def drop(paths: Iterable[Path]) -> float:
        dropped.update(paths)
        return next(still_cached)

    monkeypatch.setattr(startup, "drop_from_cache", drop)
    monkeypatch.setattr(runner, "_FRESH", get_context("forkserver"))  # forks are fast
    with session(replace(bench_config, pipelines=("memory",), images=8)) as bench_session:
        records = {one.name: one for one in CASES["startup"].measure(bench_session)}
    assert {name: one.facts["cached"] for name, one in records.items()} == {
        "torchvision, warm cache": 1.0,
        "torchvision, cold cache": 0.05,
        "memory, warm cache": 1.0,
    }
    warm = records["memory, warm cache"]
    assert 0 < warm.facts["imports"] < warm.facts["first_batch"] < warm.all_seconds[0]
    assert len({path for path in dropped if path.suffix == ".jpg"}) == 8
    line = "memory, cold: not measured: 6% of the files stayed in the page cache"
    assert line in capsys.readouterr().err


def test_memory_includes_that_of_workers(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "host_memory", lambda: len(children()))
    before = len(children())
    with session(bench_config) as bench_session:
        loading = bench_session.loading(bench_session.images(8), "torchvision")
        task = startup.build_startup(loading)
        task.run()
    assert task.facts()["host"] > before


def test_startup_time_counts_from_process_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Times count from the start of the process and exclude the slower GPU memory query."""
    facts = {"imports": 101.0, "first_batch": 102.0, "first_epoch_over": 103.0, "later_epoch": 0.5}
    fake: Any = SimpleNamespace(
        began=100.0, close=lambda: None,
        facts=lambda _: facts | {"cpu_until_then": 2.0, "host": 5},
    )  # fmt: skip
    monkeypatch.setattr(startup, "Runner", lambda *_, **__: fake)
    loading: Any = SimpleNamespace(data=SimpleNamespace(data=str(tmp_path)))
    sample, times = startup._start(loading, cold=False)
    assert (sample.wall, sample.cpu, sample.host) == (3.0, 2.0, 5)
    assert (times["imports"], times["first_batch"], times["later_epoch"]) == (1.0, 2.0, 0.5)
