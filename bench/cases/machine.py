"""The machine's highest rates of copies and matrix products."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch

from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.bench.tables import number

COPY, TO_DEVICE = "copy within memory", "copy from host to device"
PRODUCT = "matrix product, {}"
_LONG = 0.05
"""Seconds of a matrix product on a CPU that is long enough to measure."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(session: Session) -> list[Record]:
    """Measure torch's copies within memory (and from the host to a GPU) and matrix products."""
    names = [COPY, *([TO_DEVICE] if session.gpu else []), *map(PRODUCT.format, _DTYPES)]
    rows = (
        Row(
            case="machine",
            name=name,
            runner="machine",
            build=partial(build_machine, device=session.device),
            in_the_clock="copies within memory count each byte twice (read and written), those "
            "from host to device once",
            config={"device": session.device},
        )
        for name in names
    )
    records = compare(session, rows)
    for one in records:
        value = one.facts["amount"] / statistics.median(one.all_seconds)
        one.facts.update(rate=f"{number(value)} {one.facts['unit']}", value=value)
    return records


def build_machine(*, device: str) -> dict[str, Task]:
    """Build tasks that copy large tensors and multiply large matrices."""
    gpu = device == "cuda"
    size, side, times = (2**30, 8192, 20) if gpu else (2**28, 2048, 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def repeat(operation: Any, amount: float, unit: str) -> Task:
        def run() -> None:
            for _ in range(times):
                operation()

        facts: dict[str, Any] = {"amount": times * amount, "unit": unit}
        facts["settings"] = {"threads": torch.get_num_threads()}
        return Task(run, 0, lambda: facts, before=operation)

    work = {COPY: repeat(lambda: target.copy_(source), 2 * size / 1e9, "GB/s")}
    if gpu:
        pinned = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
        part = target[: len(pinned)]
        work[TO_DEVICE] = repeat(
            lambda: part.copy_(pinned, non_blocking=True), len(pinned) / 1e9, "GB/s"
        )
    for name, dtype in _DTYPES.items():
        matrix = _random_matrix(side, dtype, device)
        work[PRODUCT.format(name)] = repeat(
            lambda m=matrix: m @ m, 2 * len(matrix) ** 3 / 1e12, "TFLOP/s"
        )
    return work


def _random_matrix(side: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a random square matrix; on a CPU that emulates ``dtype``, a smaller one.

    Without AVX-512, products of bfloat16 matrices are about 75 times slower than in float32.
    """
    smaller = 256 if device == "cpu" else side
    while smaller < side:
        matrix = torch.randn(smaller, smaller).to(dtype)
        start = time.perf_counter()
        _ = matrix @ matrix
        if time.perf_counter() - start > _LONG:
            return matrix
        smaller *= 2
    return torch.randn(side, side, device=device).to(dtype)
