"""What the machine can do at most: copying, matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.machine import build_machine
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing

MACHINE = "machine"
"""Name of the contender."""
_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}


def measure(session: Session) -> list[Record]:
    """Measure copies within memory (and to a GPU's), and matrix products, as torch does them."""
    with session.contest() as contest:
        contest.enter(MACHINE, build_machine, device=session.device)
        timings = contest.run(session.config.repeats)
        facts = {work: contest.facts(MACHINE, work) for _, work in timings}
    return [
        record(
            "machine",
            work,
            timing,
            facts=_rate(facts[work]["amount"] / timing.median, facts[work]["unit"]),
            in_the_clock="copies count each byte twice: read and written",
            config={"device": session.device, "threads": torch.get_num_threads()},
        )
        for (_, work), timing in timings.items()
    ]


def _rate(value: float, unit: str) -> dict[str, Any]:
    return {"rate": f"{value:,.3g} {unit}", "value": value, "unit": unit}


def rates(contest: Contest, timings: Mapping[tuple[str, str], Timing]) -> dict[str, float]:
    """Return what a contender of this name and making did, in bytes or operations a second."""
    found = {}
    for (name, work), timing in timings.items():
        if name == MACHINE:
            facts = contest.facts(name, work)
            found[work] = facts["amount"] * _UNITS[facts["unit"]] / timing.median
    return found
