"""Starting is measured in new processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.bench.cases import CASES, startup
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session

pytestmark = pytest.mark.usefixtures("forked_contenders")


def test_startup_is_measured_in_new_processes(little: BenchConfig) -> None:
    with session(replace(little, pipelines="memory", repeats=1)) as own:
        records = {one.name: one for one in CASES["startup"].measure(own)}
    warm = records["memory, warm cache"]
    assert 0 < warm.facts["imports"] < warm.facts["first_batch"] < warm.all_seconds[0]


@pytest.mark.parametrize(("kept", "cold"), [(0.05, True), (0.06, False)])
def test_files_that_stay_in_the_cache_are_not_cold(
    kept: float,
    cold: bool,
    little: BenchConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the system says that it forgot them, or that it did not."""
    forgotten: list[Path] = []

    def forget(paths: Iterable[Path]) -> float:
        forgotten.extend(paths)
        return kept

    monkeypatch.setattr(startup, "forget", forget)
    with session(replace(little, pipelines="memory", images=8, repeats=1)) as own:
        records = {one.name: one for one in CASES["startup"].measure(own)}
    measured = {"torchvision", "memory"}
    assert set(records) == {f"{name}, warm cache" for name in measured} | (
        {f"{name}, cold cache" for name in measured} if cold else set()
    )
    assert len({path for path in forgotten if path.suffix == ".jpg"}) == 8
    assert all(one.facts["cached"] == (kept if "cold" in n else 1) for n, one in records.items())
    said = "memory, cold: not measured: the system keeps 6% of the files in its cache"
    assert (said in capsys.readouterr().err) == (not cold)
