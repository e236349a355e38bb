"""What tells a user most in few minutes: loading, the photometric stage, training, its step."""

from __future__ import annotations

from dataclasses import replace

from fastsiam.bench.cases import loader, photometric, step, train
from fastsiam.bench.records import Record
from fastsiam.bench.session import Session
from fastsiam.bench.variants import AUTHORS

_QUICK = f"eager,{AUTHORS}"
"""Steps of a CPU that need no compiler and one process."""


def measure(session: Session) -> list[Record]:
    """Measure the four, one after the other."""
    variants = session.config.variants or ("" if session.gpu else _QUICK)
    return [
        *loader.measure(session),
        *photometric.measure(session),
        *train.measure(session),
        *step.measure(replace(session, config=replace(session.config, variants=variants))),
    ]
