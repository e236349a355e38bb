"""Loading speed of each pipeline, to uint8 crops and to finished views, against bare decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from fastsiam.bench.bench_images import Images
from fastsiam.bench.cases import decode
from fastsiam.bench.config import CONTAINERS, ORIGINAL, Stored, with_form
from fastsiam.bench.measure import children
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Build, Loading, Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import Pipeline
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import BACKENDS, BASELINE
from fastsiam.pipelines.loaders import CropLoader


def measure(session: Session) -> list[Record]:
    """Measure each pipeline on each form of the images, and the decoders."""
    images = session.images(session.loaded_batch)
    rows = decode.rows(session, images)
    for pipeline in session.config.pipeline_names:
        for form in session.forms(pipeline):
            rows += [_row(session, images, pipeline, form, work) for work in ("crops", "views")]
    return decode.log_left_out(session, compare(session, rows))


def _row(session: Session, images: Images, pipeline: Pipeline, form: Stored, work: str) -> Row:
    backend, loading = BACKENDS[pipeline], session.loading(images, pipeline, form)
    runner = with_form(pipeline, form)
    build: Build = partial(build_loading, loading, form)
    if work == "crops" and not backend.crops:  # views without colour jitter, gray and blur
        plain = session.config.augment.changed(jitter_p=0.0, gray_p=0.0, blur_p=0.0, solarise_p=0.0)
        runner, build = "", partial(build_views, replace(loading, augment=plain))
    # Containers have the original images' bytes. The ceiling decodes on the pipeline's own device.
    decoders = decode.bare_decoding(
        ORIGINAL if form in CONTAINERS else form, on_gpu=session.gpu and backend.decodes_on_gpu
    )
    return Row(
        case="loader",
        name=with_form(f"{pipeline} {work}", form),
        runner=runner,
        build=build,
        torchvision=f"{BASELINE} views",
        ceiling=("bare decoding", decoders if backend.decoder else ()),
        pipeline=pipeline,
        facts={"what": work, "stored": form},
        in_the_clock="one epoch, from its first request to its last batch on the device; "
        "not: opening the data, compiling, the first epoch",
        config=session.settings(images, batch=session.loaded_batch),
    )


def build_loading(loading: Loading, form: Stored) -> dict[str, Task]:
    """Build a pipeline; its tasks load an epoch of crops and an epoch of views."""
    pipeline, tasks = loading.data.pipeline, _epochs(loading)
    return {with_form(f"{pipeline} {work}", form): task for work, task in tasks.items()}


def build_views(loading: Loading) -> Task:
    """Build a pipeline; its task loads an epoch of views."""
    return _epochs(loading)["views"]


def _epochs(loading: Loading) -> dict[str, Task]:
    """Return tasks that load an epoch: of "crops", if the pipeline makes them, and of "views"."""
    loader = build_loader(loading.data, loading.augment, batch=loading.batch, device=loading.device)
    if loader.steps != loading.images // loading.batch:
        raise RuntimeError(
            f"{loader.source} holds {loader.images:,} images, not {loading.images:,}"
        )
    epochs = count()

    def through(epoch: Callable[[int], Iterable[object]]) -> None:
        for _ in epoch(next(epochs)):
            pass

    def facts() -> dict[str, Any]:
        started = len(children())
        if loading.data.pipeline == BASELINE and started < loading.workers:
            raise RuntimeError(f"{started} of {loading.workers} workers started")
        return {"workers": loading.workers, "processes": 1 + started}

    tasks = {"views": Task(partial(through, loader.epoch), loading.images, facts)}
    if isinstance(loader, CropLoader):
        tasks = {"crops": Task(partial(through, loader.crops), loading.images, facts)} | tasks
    return tasks
