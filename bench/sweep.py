"""How speed changes with the number of workers or ranks, the batch, the view, the JPEG quality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastsiam.bench.config import Over
from fastsiam.bench.loading import build_loading, data_of
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.training import build_fed, most_ranks, train_config
from fastsiam.config import DataConfig
from fastsiam.errors import DeviceError

_IN_THE_CLOCK = {
    "loader": "one epoch to finished views, from its first request to its last batch",
    "train": "training steps on ready tensors: forward, backward, all-reduce, optimizer",
}


def sweep(session: Session) -> list[Record]:
    """Measure the pipelines (for ranks: training on ready tensors) with one setting varied."""
    over = session.config.over
    values = [int(v) for v in session.config.values.split(",") if v] or _values(session, over)
    if over == "ranks" and session.gpu and max(values) > most_ranks(session):
        raise DeviceError(f"{max(values)} ranks need as many GPUs; there are {most_ranks(session)}")
    entered: dict[str, tuple[str, int]] = {}
    with session.contest() as contest:
        for value in values:
            if over == "ranks":
                config = replace(
                    train_config(session, session.trained_batch, ranks=value),
                    data=DataConfig(pipeline="synthetic"),
                )
                name = f"synthetic, ranks {value}"
                if contest.enter(name, build_fed, ranks=value, config=config):
                    entered[name] = "synthetic", value
                continue
            for pipeline in session.config.pipeline_names:
                settings = _settings(session, over, value, pipeline)
                name = f"{pipeline}, {over} {value}"
                if contest.enter(name, build_loading, **settings):
                    entered[name] = pipeline, value
        timings = contest.run(session.config.repeats)
        facts = {name: contest.facts(name, work) for name, work in timings if work == "train"}
    records = []
    for (name, work), timing in timings.items():
        fed, value = entered[name]
        if work == "crops":
            continue
        torchvision = timings.get((f"torchvision, {over} {value}", "views"))
        first = timings.get((f"{fed}, {over} {values[0]}", work))
        records.append(
            record(
                "sweep",
                name,
                timing,
                torchvision=torchvision,
                baseline=(f"{over} {values[0]}", first) if first else None,
                pipeline=fed,
                facts={"over": over, "value": value} | facts.get(name, {}),
                in_the_clock=_IN_THE_CLOCK["train" if over == "ranks" else "loader"],
                config=session.settings(
                    **{
                        "workers": session.workers,
                        "batch": session.trained_batch if over == "ranks" else session.loaded_batch,
                        over: value,
                    }
                ),
            )
        )
    return records


def _settings(session: Session, over: Over, value: int, pipeline: Any) -> dict[str, Any]:
    """Return what a pipeline's contender is built with."""
    batch = value if over == "batch" else session.loaded_batch
    images = session.images(max(batch, session.loaded_batch))
    count = images.count // batch * batch
    if over == "quality":
        images = images.encoded(value)
    data = data_of(session, images, pipeline, "original")
    augment = session.config.augment
    return {
        "data": replace(data, workers=value) if over == "workers" else data,
        "augment": augment.changed(crop=value) if over == "crop" else augment,
        "batch": batch,
        "images": count,
        "device": session.device,
    }


def _values(session: Session, over: Over) -> list[int]:
    """Return values that make sense on this machine."""
    crop = session.config.augment.crop
    most = session.workers if over == "workers" else most_ranks(session)
    doubled = [2**i for i in range(16) if 2**i < most] + [most]
    return {
        "workers": doubled,
        "ranks": doubled,
        "batch": [64, 128, 256, 512] if session.gpu else [16, 64, 256],
        "crop": [crop // 2, crop * 3 // 4, crop],
        "quality": [50, 75, 90, 95],
    }[over]
