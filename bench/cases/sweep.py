"""How speed changes with the number of workers or ranks, the batch, the view, the JPEG quality,
the prefetched batches, the share of the GPU's JPEG engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastsiam.bench.cases.loader import build_loading
from fastsiam.bench.cases.train import build_fed
from fastsiam.bench.config import Over
from fastsiam.bench.records import Record, record
from fastsiam.bench.runner import Build, compare
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig, Pipeline
from fastsiam.errors import DeviceError
from fastsiam.pipelines.backends import BACKENDS, BASELINE, CEILING, Backend

_MATTERS_TO: dict[Over, Callable[[Backend], bool]] = {
    "prefetch": lambda backend: backend.prefetches,
    "jpeg-engine": lambda backend: backend.decodes_on_gpu,
}
"""Settings of some pipelines only."""


def measure(session: Session) -> list[Record]:
    """Measure the pipelines (for ranks: training on ready tensors) with one setting varied."""
    over, ranks = session.config.over, session.config.over == "ranks"
    values = [int(v) for v in session.config.values.split(",") if v] or _values(session, over)
    if ranks and session.gpu and max(values) > session.most_ranks:
        raise DeviceError(f"{max(values)} ranks need as many GPUs; there are {session.most_ranks}")
    work, build = ("train", build_fed) if ranks else ("views", build_loading)
    added: dict[str, tuple[Pipeline, int]] = {}
    runners: dict[str, Build] = {}
    for value in values:
        for pipeline in (CEILING,) if ranks else _pipelines(session, over):
            name = f"{pipeline}, {over} {value}"
            added[name] = pipeline, value
            own = _ranks(session, value) if ranks else _settings(session, over, value, pipeline)
            runners[name] = partial(build, **own)
    several = {name: value for name, (_, value) in added.items() if ranks}
    timings = compare(session, runners, ranks=several)
    batches = {"batch": session.trained_batch if ranks else session.loaded_batch}
    batches |= {"workers": session.workers}
    records = []
    for (name, did), timing in timings.items():
        if did != work:
            continue
        pipeline, value = added[name]
        first = timings.get((f"{pipeline}, {over} {values[0]}", work))
        one = record(
            "sweep",
            name,
            timing,
            torchvision=timings.get((f"{BASELINE}, {over} {value}", "views")),
            baseline=(f"{over} {values[0]}", first),
            pipeline=pipeline,
            facts={"over": over, "value": value},
            in_the_clock="training steps on ready tensors: forward, backward, all-reduce, optimizer"
            if ranks
            else "one epoch to finished views, from its first request to its last batch",
            config=session.settings(**batches | {over: value}),
        )
        records.append(one)
    return records


def _pipelines(session: Session, over: Over) -> list[Pipeline]:
    """Return the pipelines that the setting matters to."""
    names, matters = list(session.config.pipeline_names), _MATTERS_TO.get(over)
    return [name for name in names if matters(BACKENDS[name])] if matters else names


def _ranks(session: Session, value: int) -> dict[str, Any]:
    """Return what training on ready tensors by so many ranks is built with."""
    config = session.train_config(session.trained_batch, ranks=value)
    return {"config": replace(config, data=DataConfig(pipeline=CEILING))}


def _settings(session: Session, over: Over, value: int, pipeline: Pipeline) -> dict[str, Any]:
    """Return what a pipeline's runner is built with."""
    batch = value if over == "batch" else session.loaded_batch
    images = session.images(max(batch, session.loaded_batch))
    count = images.count // batch * batch
    if over == "quality":
        images = images.encoded(value)
    data = session.data(images, pipeline)
    augment = session.config.augment
    varied: dict[Over, dict[str, Any]] = {
        "workers": {"workers": value},
        "prefetch": {"prefetch": value},
        "jpeg-engine": {"dali_hw_decoder_load": value / 100},
    }
    return {
        "data": replace(data, **varied.get(over, {})),
        "augment": augment.changed(crop=value) if over == "crop" else augment,
        "batch": batch,
        "images": count,
        "device": session.device,
    }


def _values(session: Session, over: Over) -> list[int]:
    """Return values that make sense on this machine."""
    crop = session.config.augment.crop
    most = session.workers if over == "workers" else session.most_ranks
    doubled = [2**i for i in range(16) if 2**i < most] + [most]
    return {
        "workers": doubled,
        "ranks": doubled,
        "batch": [64, 128, 256, 512] if session.gpu else [16, 64, 256],
        "crop": [crop // 2, crop * 3 // 4, crop],
        "quality": [50, 75, 90, 95],
        "prefetch": [1, 2, 3, 4],
        "jpeg-engine": [0, 65, 90, 100],
    }[over]
