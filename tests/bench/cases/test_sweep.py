"""Sweeps vary one setting, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session


def test_two_ranks_share_the_work(little: BenchConfig) -> None:
    with session(replace(little, over="ranks", values=(1, 2))) as own:
        one, two = CASES["sweep"].measure(own)
    assert (one.facts["value"], two.facts["value"]) == (1, 2) and two.ratio is not None
    assert two.images % 16 == 0


@pytest.mark.dali
def test_a_sweep_of_the_jpeg_engine_is_dalis(little: BenchConfig) -> None:
    config = replace(little, over="jpeg-engine", values=(0, 90), pipelines=("dali", "memory"))
    with session(config) as own:
        records = CASES["sweep"].measure(own)
    assert [one.name for one in records] == ["dali, jpeg-engine 0", "dali, jpeg-engine 90"]
    assert records[1].config["jpeg-engine"] == 90 and records[1].baseline == "jpeg-engine 0"
    with pytest.raises(ValueError, match="percentages, 0 to 100"):
        replace(config, values=(0, 101))
