"""A trace of a few training steps: the model's operations beside what the loader does meanwhile."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from fastsiam import distributed, trace
from fastsiam.bench.contest import Contender, Work
from fastsiam.bench.loading import data_of
from fastsiam.bench.records import check_writable
from fastsiam.bench.session import Session
from fastsiam.bench.training import made_ahead, step_of, train_config
from fastsiam.config import DataConfig, Pipeline, TrainConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import build_loader
from fastsiam.training.step import autocast_type

_MARK = "fastsiam: the clocks meet"


def profile(session: Session, pipeline: Pipeline, steps: int, out: Path) -> str:
    """Trace a few steps of training, from the middle of an epoch.

    Args:
        session: what is trained on what.
        pipeline: that feeds it.
        steps: how many.
        out: gets a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Returns:
        For people: how busy the GPU was, and where the time goes, by range and by operation.

    Raises:
        ContenderFailed: the pipeline cannot run here.
        DataError: ``out`` cannot be written.
    """
    batch = session.trained_batch
    check_writable(out)
    ready = DataConfig(pipeline="synthetic")
    data = DataConfig(pipeline=pipeline, workers=session.workers)
    images = session.images(batch, at_least=_warm(data) + steps + 1)
    data = ready if pipeline == "synthetic" else data_of(session, images, pipeline, "original")
    config = replace(train_config(session, batch), data=data)
    with tempfile.TemporaryDirectory(prefix="fastsiam-trace-") as folder:
        notes, own = Path(folder), Path(folder) / "torch.json"
        os.environ["FASTSIAM_TRACE"] = str(notes)
        try:
            contender = Contender(build_profile, {"config": config, "steps": steps, "path": own})
        finally:
            del os.environ["FASTSIAM_TRACE"]
        facts = contender.facts("profile")
        contender.close()
        whole = json.loads(own.read_text())
        spans = trace.read(notes)
    events = whole["traceEvents"]
    mark = next(event["ts"] for event in events if event.get("name") == _MARK)
    ours = [_event(span, mark, facts["mark"]) for span in spans]
    window = (facts["began"] - facts["mark"]) / 1e3 + mark, facts["seconds"] * 1e6
    ours = [e for e in ours if e["ts"] + e["dur"] > window[0] and e["ts"] < sum(window)]
    whole["traceEvents"] = events + ours + _names(ours)
    try:
        out.write_text(json.dumps(whole))
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    return (
        f"{steps} steps of {batch} images in {facts['seconds']:.2f} s{gaps(events, steps)}\n\n"
        f"{_ranges(ours, steps, facts['seconds'])}\n\n{facts['operations']}"
    )


def gaps(events: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Say how long the GPU had nothing to do: then the host holds it back, or the loader does.

    Args:
        events: torch's trace, times in microseconds.
        steps: how many it holds.

    Returns:
        The share of the time in which it was busy, and the longest gap between two of its kernels
        or copies; empty if the trace has none.
    """
    runs = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not runs:
        return ""
    end, idle, longest = runs[0][1], 0.0, 0.0
    for began, ended in runs:
        idle, longest = idle + max(0.0, began - end), max(longest, began - end)
        end = max(end, ended)
    whole = end - runs[0][0]
    return (
        f"; the GPU was busy for {1 - idle / whole:.1%} of the time, "
        f"its longest gap was {longest / 1e3:.2f} ms, {longest * steps / whole:.1%} of a step"
    )


def build_profile(*, config: TrainConfig, steps: int, path: Path) -> dict[str, Work]:
    """Build a model and a loader; the work is to train some steps and write torch's trace."""
    place = distributed.start(config.run)
    dtype = autocast_type(config, place)
    loader = build_loader(
        config.data, config.augment, batch=config.optim.batch, device=place.device, dtype=dtype
    )
    take, _ = step_of(config, place)
    epochs = count()
    facts: dict[str, Any] = {}
    on_gpu = place.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def run() -> None:
        feed = loader.epoch(next(epochs))
        for batch in islice(feed, _warm(config.data)):
            take(batch)
        with torch.profiler.profile(activities=activities) as profiler:
            facts["mark"] = time.time_ns()
            with torch.profiler.record_function(_MARK):
                pass
            facts["began"], began = time.time_ns(), time.perf_counter()
            for _ in range(steps):
                with trace.span("wait for data"):
                    batch = next(feed)
                take(batch)
            if on_gpu:
                torch.cuda.synchronize()
            facts["seconds"] = time.perf_counter() - began
        profiler.export_chrome_trace(str(path))
        facts["operations"] = profiler.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=12,
            max_name_column_width=40,
        )

    return {"profile": Work(run, steps * config.optim.batch, lambda: facts)}


def _warm(data: DataConfig) -> int:
    """Return how many steps go before those that are traced: all that were made ahead."""
    return 2 + made_ahead(data)


def _event(span: dict[str, Any], mark: float, mark_ns: int) -> dict[str, Any]:
    """Return a range as a trace event, on the clock of torch's trace (microseconds)."""
    return {
        "ph": "X",
        "cat": "fastsiam",
        "name": span["name"],
        "pid": span["process"],
        "tid": f"fastsiam {span['thread']}",
        "ts": mark + (span["began"] - mark_ns) / 1e3,
        "dur": (span["ended"] - span["began"]) / 1e3,
    }


def _names(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name the rows of the loader's processes and threads after what they do."""
    does: dict[tuple[int, str], set[str]] = defaultdict(set)
    for event in events:
        does[event["pid"], event["tid"]].add(event["name"])
    return [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": thread,
            "args": {"name": f"fastsiam: {', '.join(sorted(names))}"},
        }
        for (process, thread), names in does.items()
    ]


def _ranges(events: list[dict[str, Any]], steps: int, seconds: float) -> str:
    """Return a table of our ranges: their time in a step, in all threads together."""
    durations: dict[str, list[float]] = defaultdict(list)
    threads: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for event in events:
        durations[event["name"]].append(event["dur"] / 1e3)
        threads[event["name"]].add((event["pid"], event["tid"]))
    lines = [
        "| range         | ms a step | of the time | threads | times | median ms |",
        "| ------------- | --------- | ----------- | ------- | ----- | --------- |",
    ]
    for name, all_ms in sorted(durations.items(), key=lambda item: -sum(item[1])):
        lines.append(
            f"| {name:13} | {sum(all_ms) / steps:9.1f} | {sum(all_ms) / 10 / seconds:10.0f}% | "
            f"{len(threads[name]):7} | {len(all_ms):5} | {statistics.median(all_ms):9.2f} |"
        )
    return "\n".join(lines)
