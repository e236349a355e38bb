"""A trace of a few training steps: the model's operations, and what the loader does meanwhile.

It writes one pipeline's trace to a file for a trace viewer, so it is not in the table of cases.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastsiam import trace
from fastsiam.bench.bench_images import Images, users_store
from fastsiam.bench.cases.step import step_of, training_setup
from fastsiam.bench.cases.train import batches_ahead
from fastsiam.bench.measure import time_task
from fastsiam.bench.measurements import Record, Row, Timing
from fastsiam.bench.runner import Runner, Task
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig, Pipeline, PipelineSetting, TrainConfig
from fastsiam.files import atomic_write_for_user
from fastsiam.markdown import markdown
from fastsiam.pipelines import open_store
from fastsiam.pipelines.automatic import choose_pipeline
from fastsiam.pipelines.backends import CEILING
from fastsiam.run.records import check_targets
from fastsiam.views.batch import Batch


def profile(session: Session, choice: PipelineSetting, steps: int, out: Path) -> tuple[str, Record]:
    """Trace a few steps of training, from the middle of an epoch, into the file ``out``.

    Returns:
        A text for display: how busy the GPU was, and the time per range and per operation. And a
        record of the traced steps.

    Raises:
        RunnerError: the pipeline cannot run here.
        FastSiamError: ``out`` cannot be written.
    """
    check_targets(out)
    batch = session.trained_batch
    images, data = None, DataConfig(pipeline=CEILING, workers=session.workers)
    if choice != CEILING:
        data = DataConfig(pipeline=choice, workers=session.workers)
        images = session.images(batch, at_least=batches_ahead(data) + steps + 1)
        data = session.data(
            images, _choose_pipeline(session, images) if choice == "auto" else choice
        )
    pipeline: Pipeline = data.pipeline  # type: ignore[assignment]  # not "auto"
    config = replace(session.train_config(batch), data=data)
    with tempfile.TemporaryDirectory(prefix="fastsiam-trace-") as folder:
        build = partial(build_profile, config=config, steps=steps, folder=folder)
        with closing(Runner("profile", build)) as runner:
            facts = runner.facts("profile")
        dump, spans = json.loads(Path(folder, "torch.json").read_text()), trace.read(Path(folder))
    events, seconds, base = dump["traceEvents"], facts["sample"].wall, dump["baseTimeNanoseconds"]
    end = facts["began"] + seconds * 1e9
    ranges = [
        _event(span, base)
        for span in spans
        if span["ended"] > facts["began"] and span["began"] < end
    ]
    with atomic_write_for_user(out) as temporary:
        temporary.write_text(json.dumps(dump | {"traceEvents": events + ranges}))
    usage, summary = gpu_use(events, steps), f"{steps} steps of {batch} images in {seconds:.2f} s"
    if usage:
        summary += (
            f"; the GPU was busy for {usage['gpu_busy']:.1%} of the time, its longest gap was "
            f"{1e3 * usage['longest_gap']:.2f} ms, {usage['gap_of_a_step']:.1%} of a step"
        )
    text = f"{summary}\n\n{_table(ranges, steps, seconds)}\n\n{facts['operations']}"
    row = Row(
        case="profile",
        name=pipeline,
        pipeline=pipeline,
        facts={"steps": steps, **usage},
        in_the_clock="traced steps in the middle of an epoch; tracing slows them down",
        config=session.settings(images, batch=batch, workers=session.workers),
    )
    return text, row.record({pipeline: Timing([facts["sample"]], steps * batch)})


def _choose_pipeline(session: Session, images: Images) -> Pipeline:
    """Return the pipeline that training would choose for all of the user's data.

    Generated images stand in for the recipe's data set. ImageNet does not fit into memory.
    """
    store, keeps = users_store(session.config), True
    if store is None:
        store, keeps = open_store(images.folder, "train"), session.config.recipe != "imagenet"
    choice = choose_pipeline(store, device=torch.device(session.device), keeps=keeps)
    session.console.say(f"pipeline {choice.name}: {choice.why}")
    return choice.name


def gpu_use(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Compute how long the GPU was idle, because it waited for the host or the loader.

    Args:
        events: torch's trace, with times in microseconds.
        steps: number of traced steps.

    Returns:
        An empty dict if the trace has no GPU kernels or copies. Otherwise "gpu_busy": share of the
        time in which the GPU was active. "longest_gap": longest time between two kernels or copies
        in seconds, without the first traced step, which also starts the profiler. "gap_of_a_step":
        that gap divided by the time of a step.
    """
    runs = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not runs:
        return {}
    starts, ends = np.array(runs).T
    gaps = np.maximum(0, starts[1:] - np.maximum.accumulate(ends)[:-1])
    of_first_step = len(runs) // steps if steps > 1 else 0
    total, longest = ends.max() - starts[0], gaps[of_first_step:].max(initial=0)
    return {
        "gpu_busy": float(1 - gaps.sum() / total),
        "longest_gap": float(longest / 1e6),
        "gap_of_a_step": float(longest * steps / total),
    }


def _event(span: dict[str, Any], base: int) -> dict[str, Any]:
    """Convert a range to a trace event, in microseconds after ``base``, which is in nanoseconds."""
    return {
        "ph": "X",
        "cat": "fastsiam",
        "name": span["name"],
        "pid": span["process"],
        "tid": f"fastsiam {span['thread']}",
        "ts": (span["began"] - base) / 1e3,
        "dur": (span["ended"] - span["began"]) / 1e3,
    }


def _table(events: list[dict[str, Any]], steps: int, seconds: float) -> str:
    """Format a table of fastsiam's ranges, with their time per step, summed over all threads."""
    ranges: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        ranges[event["name"]].append(event)
    rows = []
    for name, group in sorted(ranges.items(), key=lambda item: -sum(x["dur"] for x in item[1])):
        times = [event["dur"] / 1e3 for event in group]
        threads = len({(event["pid"], event["tid"]) for event in group})
        row = [f"{sum(times) / steps:.1f}", f"{sum(times) / 10 / seconds:.0f}%", str(threads)]
        rows.append([name, *row, str(len(group)), f"{statistics.median(times):.2f}"])
    return markdown(["range", "ms a step", "of the time", "threads", "times", "median ms"], rows)


def build_profile(*, config: TrainConfig, steps: int, folder: str) -> Task:
    """Build a model and a loader; the task trains some steps and writes torch's trace."""
    os.environ["FASTSIAM_TRACE"] = folder
    importlib.reload(trace)  # which reads the variable
    setup = training_setup(config)
    take = step_of(setup).take
    facts: dict[str, Any] = {}
    on_gpu = setup.place.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def take_steps(feed: Iterator[Batch]) -> None:
        facts["began"] = time.time_ns()
        for _ in range(steps):
            with trace.span("wait for data"):
                batch = next(feed)
            take(batch)

    def run() -> None:
        feed = setup.loader.epoch(0)
        for batch in islice(feed, batches_ahead(config.data)):
            take(batch)
        with torch.profiler.profile(activities=activities) as profiler:
            facts["sample"] = time_task(partial(take_steps, feed))
        profiler.export_chrome_trace(f"{folder}/torch.json")
        facts["operations"] = profiler.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=12,
            max_name_column_width=40,
        )

    return Task(run, steps * config.optim.batch, lambda: facts)
