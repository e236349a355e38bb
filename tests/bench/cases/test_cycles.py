"""What a pixel costs is measured for each stage and each kind of library."""

from __future__ import annotations

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.contestants.cycles import ticks_a_second
from fastsiam.bench.session import session
from fastsiam.bench.tables import rows_of
from fastsiam.kernels import library

pytestmark = pytest.mark.usefixtures("forked_contenders")
STAGES = {
    "decode, the whole",
    "decode, the boxes' part",
    "crop, boxes as drawn",
    "crop, from twice as wide",
    "normalise, float32",
    "normalise, bfloat16",
    "brightness",
    "contrast",
    "saturation",
    "hue",
    "gray",
    "solarise",
    "blur, sigma 2 (radius 1)",
    "photometric stage as drawn",
}


def test_each_stage_is_measured_with_each_library(little: BenchConfig) -> None:
    with session(little) as own:
        records = CASES["cycles"].measure(own)
    found = {(one.facts["kind"], one.facts["stage"]): one for one in records}
    assert {kind for kind, _ in found} == set(library.kinds())
    assert {stage for _, stage in found} >= STAGES
    for one in records:
        assert one.facts["ns"] > 0 and one.facts["pixels"] > 0 and one.images == 0
        if "cycles" in one.facts:
            rate = float(one.facts["clock"].split()[0])
            assert one.facts["cycles"] / one.facts["ns"] == pytest.approx(rate, rel=0.02)
    drawn = found[library.kinds()[0], "crop, boxes as drawn"].facts["pixels"]
    assert drawn == 2 * 24 * 32 * 32
    heads, _ = rows_of(records)
    assert heads[1] == "ns a pixel" and "images/s" not in heads


def test_the_counters_rate_is_a_processors() -> None:
    first, second = ticks_a_second(), ticks_a_second()
    if first is None or second is None:
        pytest.skip("no time-stamp counter")
    assert 5e8 < first < 1e10 and second == pytest.approx(first, rel=0.02)
