"""The machine's limits are measured in their units."""

from __future__ import annotations

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session

pytestmark = pytest.mark.usefixtures("forked_contenders")


def test_the_machines_limits(little: BenchConfig) -> None:
    with session(little) as own:
        most = CASES["machine"].measure(own)
    assert [one.facts["rate"].split()[1] for one in most] == ["GB/s", "TFLOP/s", "TFLOP/s"]
