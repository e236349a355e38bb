"""The cost of digests is measured beside a step of the same batch."""

from __future__ import annotations

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.cases.digest import BATCHES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from fastsiam.bench.tables import table

pytestmark = pytest.mark.usefixtures("forked_contenders")


@pytest.mark.slow
def test_digests_are_measured_beside_a_step(little: BenchConfig) -> None:
    with session(little) as own:
        records = CASES["digest"].measure(own)
    found = {one.name: one for one in records}
    assert set(found) == {"digest", "step"} and found["digest"].images == BATCHES * 8
    share = found["digest"].facts["percent_of_step"]
    seconds = [found[name].cpu_seconds_per_image for name in ("digest", "step")]
    assert share == pytest.approx(100 * seconds[0] / seconds[1])
    assert "percent_of_step" not in found["step"].facts
    assert "% of a step" in table(records)
