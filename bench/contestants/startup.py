"""A pipeline that gets started, in a process that is as new as a user's."""

from __future__ import annotations

import time
from typing import Any

from fastsiam.bench.contest import Work
from fastsiam.bench.measure import cpu_seconds, wait_for_gpu
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader


def build_startup(
    *, data: DataConfig, augment: AugmentConfig, batch: int, device: str, began: float
) -> dict[str, Work]:
    """Load the first batch and two epochs; ``began`` is when the process was started."""
    facts: dict[str, Any] = {}

    def begin() -> None:
        facts["imports"] = time.monotonic() - began
        loader = build_loader(data, augment, batch=batch, device=device)
        for number in range(2):
            start = time.monotonic()
            for step, _ in enumerate(loader.epoch(number)):
                if number == step == 0:
                    wait_for_gpu()
                    facts["first_batch"] = time.monotonic() - began
            wait_for_gpu()
            facts["first_epoch" if number == 0 else "later_epoch"] = time.monotonic() - start
            facts.setdefault("first_epoch_over", time.monotonic() - began)
            facts.setdefault("cpu_until_then", cpu_seconds())
        loader.close()

    return {"startup": Work(begin, batch, lambda: facts)}
