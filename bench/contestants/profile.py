"""Training at work under torch's profiler."""

from __future__ import annotations

import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from fastsiam import trace
from fastsiam.bench.contest import Work
from fastsiam.bench.contestants.step import fed, step_of
from fastsiam.bench.measure import wait_for_gpu
from fastsiam.config import TrainConfig

MARK = "fastsiam: the clocks meet"
"""A range of no length, by which the times of our own notes and of torch's trace are compared."""
WARM_UP = 6
"""Steps before those that are traced: about as many as batches are made ahead."""


def build_profile(*, config: TrainConfig, steps: int, path: Path) -> dict[str, Work]:
    """Build a model and a loader; the work is to train some steps and write torch's trace."""
    own = fed(config)
    take, epochs = step_of(own).take, count()
    facts: dict[str, Any] = {}
    on_gpu = own.place.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def run() -> None:
        feed = own.loader.epoch(next(epochs))
        for batch in islice(feed, WARM_UP):
            take(batch)
        with torch.profiler.profile(activities=activities) as profiler:
            facts["mark"] = time.time_ns()
            with torch.profiler.record_function(MARK):
                pass
            facts["began"], began = time.time_ns(), time.perf_counter()
            for _ in range(steps):
                with trace.span("wait for data"):
                    batch = next(feed)
                take(batch)
            wait_for_gpu()
            facts["seconds"] = time.perf_counter() - began
        profiler.export_chrome_trace(str(path))
        facts["operations"] = profiler.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=12,
            max_name_column_width=40,
        )

    return {"profile": Work(run, steps * config.optim.batch, lambda: facts)}
