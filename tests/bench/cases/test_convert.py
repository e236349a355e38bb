"""Conversion is measured beside others, on sources that they can read."""

from __future__ import annotations

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session

pytestmark = pytest.mark.usefixtures("forked_contenders")


@pytest.mark.ffcv
def test_conversion_beside_cp_and_ffcv(little: BenchConfig) -> None:
    with session(little) as own:
        records = {one.name: one for one in CASES["convert"].measure(own)}
    files = ["cp, files", "fastsiam, files", "ffcv, files"]
    assert list(records) == [*files, "cp, a tar", "fastsiam, a tar"]  # FFCV's reads no tar
    ours = records["fastsiam, files"]
    assert ours.ratio == pytest.approx(
        ours.images_per_second / records["cp, files"].images_per_second
    )
    assert ours.facts["megabytes_per_second"] > 0 and ours.images == 24
