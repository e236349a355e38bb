"""Time from process start to the first batch, and per epoch, with a warm and a cold page cache."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastsiam.bench.measure import cpu_seconds, drop_from_cache, host_memory, wait_for_gpu
from fastsiam.bench.measurements import Record, Row, Sample, Timing
from fastsiam.bench.runner import Loading, Runner, RunnerError, Task
from fastsiam.config import Pipeline
from fastsiam.kernels.cores import limit_torch_threads
from fastsiam.pipelines import build_loader

if TYPE_CHECKING:  # not imported in the processes that are measured
    from fastsiam.bench.session import Session

_STILL_COLD = 0.05
"""Maximum share of the files that may still be in the page cache in a cold start."""


def measure(session: Session) -> list[Record]:
    """Measure each pipeline with warm and cold cache, in a new process for each repeat."""
    images = session.images(session.loaded_batch)
    runs: dict[tuple[Pipeline, str], list[tuple[Sample, dict[str, Any]]]] = {
        (pipeline, state): []
        for pipeline in session.config.pipeline_names
        for state in ("warm", "cold")
    }
    for number in range(session.config.repeats):
        session.console.say(f"startup: round {number + 1} of {session.config.repeats}")
        for pipeline, state in list(runs):
            try:
                loading = session.loading(images, pipeline)
                runs[pipeline, state].append(_start(loading, cold=state == "cold"))
            except RunnerError as failure:
                session.skip(f"{pipeline}, {state}", failure)
                del runs[pipeline, state]
    records = []
    for (pipeline, state), started in runs.items():
        numbers = {
            key: statistics.median(facts[key] for _, facts in started) for key in started[0][1]
        }
        if state == "cold" and numbers["cached"] > _STILL_COLD:
            kept = f"{numbers['cached']:.0%} of the files stayed in the page cache"
            session.skip(f"{pipeline}, cold", kept)
            continue
        row = Row(
            case="startup",
            name=f"{pipeline}, {state} cache",
            pipeline=pipeline,
            facts=numbers,
            in_the_clock="from the start of python to the end of the first epoch",
            config=session.settings(images, batch=session.loaded_batch),
        )
        records.append(row.record({row.name: Timing([one for one, _ in started], images.count)}))
    return records


def _start(loading: Loading, *, cold: bool) -> tuple[Sample, dict[str, Any]]:
    """Load in a new process; return its time to the end of the first epoch, and its facts."""
    files = [path for path in Path(loading.data.data).rglob("*") if path.is_file()]
    cached = drop_from_cache(files) if cold else 1.0
    with closing(Runner("startup", partial(build_startup, loading), fresh=True)) as runner:
        facts = runner.facts("startup") | {"cached": cached}
    for moment in ("imports", "first_batch", "first_epoch_over"):
        facts[moment] -= runner.began
    wall, cpu, host = facts["first_epoch_over"], facts.pop("cpu_until_then"), facts.pop("host")
    return Sample(wall, cpu, host), facts


def build_startup(loading: Loading) -> Task:
    """Build a task that loads two epochs; some of its facts are values of ``time.monotonic``."""
    facts: dict[str, Any] = {}

    def run() -> None:
        facts["imports"] = time.monotonic()
        limit_torch_threads()
        loader = build_loader(
            loading.data, loading.augment, batch=loading.batch, device=loading.device
        )
        for number in range(2):
            start = time.monotonic()
            for step, _ in enumerate(loader.epoch(number)):
                if number == step == 0:
                    wait_for_gpu()
                    facts["first_batch"] = time.monotonic()
            wait_for_gpu()
            facts["first_epoch" if number == 0 else "later_epoch"] = time.monotonic() - start
            facts.setdefault("first_epoch_over", time.monotonic())
            facts.setdefault("cpu_until_then", cpu_seconds())
        facts["host"] = host_memory()  # with the loader's processes
        loader.close()

    return Task(run, loading.images, lambda: facts)
