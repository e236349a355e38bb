"""How fast each pipeline loads, to uint8 crops and to finished views, beside bare decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

from fastsiam.bench.cases.decode import decode_records, decoders, fastest
from fastsiam.bench.config import CONTAINERS, ORIGINAL, Stored
from fastsiam.bench.measure import children
from fastsiam.bench.records import Record, record
from fastsiam.bench.runner import Task, Timings, compare
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing
from fastsiam.config import AugmentConfig, DataConfig, Pipeline
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import BACKENDS, BASELINE
from fastsiam.pipelines.loaders import CropLoader


def measure(session: Session) -> list[Record]:
    """Measure each pipeline on each form of the images, and the decoders."""
    images = session.images(session.loaded_batch)
    added: dict[str, tuple[Pipeline, Stored]] = {}
    runners = decoders(session, images)
    for pipeline in session.config.pipeline_names:
        for form in session.forms(pipeline):
            name = pipeline if form == "original" else f"{pipeline}, {form}"
            builds = {name: build_loading}
            if not BACKENDS[pipeline].crops:
                builds[f"{name}, without colours"] = build_plain_crops
            for runner, build in builds.items():
                added[runner] = pipeline, form
                runners[runner] = partial(
                    build,
                    data=session.data(images, pipeline, form),
                    augment=session.config.augment,
                    batch=session.loaded_batch,
                    images=images.count,
                    device=session.device,
                )
    timings = compare(session, runners)
    records = decode_records(session, images, timings)
    for (runner, work), timing in timings.items():
        if runner not in added:
            continue
        pipeline, form = added[runner]
        one = record(
            "loader",
            f"{pipeline} {work}" + ("" if form == "original" else f", {form}"),
            timing,
            torchvision=timings.get((BASELINE, "views")),
            ceiling=("bare decoding", _ceiling(session, pipeline, form, timings)),
            pipeline=pipeline,
            facts={"what": work, "stored": form},
            in_the_clock="one epoch, from its first request to its last batch on the device; "
            "not: opening the data, compiling, the first epoch",
            config=session.settings(
                batch=session.loaded_batch, workers=session.workers, data=images.about
            ),
        )
        records.append(one)
    return records


def _ceiling(session: Session, pipeline: Pipeline, form: Stored, timings: Timings) -> Timing | None:
    """Return the fastest decoder, of the device on which a pipeline decodes, if it does."""
    backend = BACKENDS[pipeline]
    if backend.decoder is None:
        return None
    bytes_of = ORIGINAL if form in CONTAINERS else form
    return fastest(timings, bytes_of, on_gpu=session.gpu and backend.decodes_on_gpu)


def build_loading(
    *, data: DataConfig, augment: AugmentConfig, batch: int, images: int, device: str
) -> dict[str, Task]:
    """Build a pipeline; its tasks are an epoch, to "crops" and to "views"."""
    loader, epochs = build_loader(data, augment, batch=batch, device=device), count()
    if loader.steps != images // batch:
        raise RuntimeError(f"{loader.source} holds {loader.images:,} images, not {images:,}")

    def through(epoch: Callable[[int], Iterable[object]]) -> None:
        for _ in epoch(next(epochs)):
            pass

    def facts() -> dict[str, Any]:
        started = len(children())
        if data.pipeline == BASELINE and started < int(data.workers):
            raise RuntimeError(f"{started} of {data.workers} workers started")
        return {"workers": data.workers, "processes": 1 + started}

    tasks = {"views": Task(partial(through, loader.epoch), images, facts)}
    if isinstance(loader, CropLoader):
        tasks = {"crops": Task(partial(through, loader.crops), images, facts)} | tasks
    return tasks


def build_plain_crops(*, augment: AugmentConfig, **settings: Any) -> dict[str, Task]:
    """Build a pipeline that makes no uint8 crops; its crops are views without colours and blur."""
    plain = augment.changed(jitter_p=0.0, gray_p=0.0, blur_p=0.0, solarise_p=0.0)
    return {"crops": build_loading(augment=plain, **settings)["views"]}
