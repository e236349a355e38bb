"""Upper limits of the machine: copies and matrix products."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fastsiam.bench.records import Record, Timing, record
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(session: Session) -> list[Record]:
    """Measure copies within memory (and to a GPU's), and matrix products, as torch does them."""
    timings = compare(session, {"machine": partial(build_machine, device=session.device)})
    return [
        record(
            "machine",
            work,
            timing,
            facts=_rate(timing),
            in_the_clock="copies count each byte twice: read and written",
            config={"device": session.device, "threads": torch.get_num_threads()},
        )
        for work, timing in timings.items()
    ]


def _rate(timing: Timing) -> dict[str, Any]:
    value, unit = timing.facts["amount"] / timing.median, timing.facts["unit"]
    return {"rate": f"{value:,.3g} {unit}", "value": value}


def build_machine(*, device: str) -> dict[str, Task]:
    """Copy large tensors, and multiply large matrices."""
    gpu = device == "cuda"
    size, side, times = (2**30, 8192, 20) if gpu else (2**28, 2048, 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def several(one: Any, amount: float, unit: str) -> Task:
        def run() -> None:
            for _ in range(times):
                one()

        return Task(run, 0, lambda: {"amount": times * amount, "unit": unit})

    work = {"copy within memory": several(lambda: target.copy_(source), 2 * size / 1e9, "GB/s")}
    if gpu:
        pinned = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
        part = target[: len(pinned)]
        work["copy from host to device"] = several(
            lambda: part.copy_(pinned, non_blocking=True), len(pinned) / 1e9, "GB/s"
        )
    for name, dtype in _DTYPES.items():
        matrix = torch.randn(side, side, device=device).to(dtype)
        work[f"matrix product, {name}"] = several(
            lambda m=matrix: m @ m, 2 * side**3 / 1e12, "TFLOP/s"
        )
    return work
