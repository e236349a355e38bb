"""Records that were not measured."""

from __future__ import annotations

from typing import Any

from fastsiam.bench.records import Record, record
from fastsiam.bench.timing import Sample, Timing


def sample(wall: float, cpu: float = 0.0) -> Sample:
    return Sample(wall, cpu)


def made(name: str = "a", case: str = "loader", wall: float = 2.0, **more: Any) -> Record:
    timing = Timing([sample(wall, 3.0)], 8)
    return record(case, name, timing, config={"batch": 8}, **more)
