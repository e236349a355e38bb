"""Starting is measured in new processes."""

from __future__ import annotations

from dataclasses import replace

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session


def test_startup_is_measured_in_new_processes(little: BenchConfig) -> None:
    with session(replace(little, pipelines="memory", repeats=1)) as own:
        records = {one.name: one for one in CASES["startup"].measure(own)}
    warm = records["memory, warm cache"]
    assert 0 < warm.facts["imports"] < warm.facts["first_batch"] < warm.all_seconds[0]
    cold = records.get("torchvision, cold cache")
    assert cold is None or cold.facts["cached"] <= 0.05
