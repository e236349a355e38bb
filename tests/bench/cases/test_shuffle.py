"""How well a window shuffles, measured on the data's labels or on labels like ImageNet's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastsiam.bench.cases import CASES, shuffle
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.bench.tables import table


def test_windows_are_compared_with_full_shuffle(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``--data``, the default data of ``train`` is measured."""
    monkeypatch.setenv("FASTSIAM_DATA", bench_config.data)
    with session(replace(bench_config, data="", values=(1, 7))) as bench_session:
        records = CASES["shuffle"].measure(bench_session)
    assert [one.name for one in records] == ["full", "window:1", "window:7"]
    assert all(one.images == 24 and "moved" in one.facts for one in records)
    assert {one.config["data"] for one in records} == {"24 images of train"}
    assert records[0].facts["moved"] == records[0].facts["parted"] == records[0].ratio == 1
    assert "largest class per batch, mean" in table(records)


def test_sorted_classes_are_simulated_without_data(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shuffle, "_IMAGES", 5000)
    monkeypatch.setattr(shuffle, "_CLASSES", 5)
    monkeypatch.delenv("FASTSIAM_DATA", raising=False)
    with session(replace(bench_config, data="", values=(100, 2500), batch=100)) as bench_session:
        full, small, large = CASES["shuffle"].measure(bench_session)
    assert full.facts["usual"] <= large.facts["usual"] < small.facts["usual"]
    assert full.config["data"] == "5,000 images of 5 classes, sorted"
