"""Loaders that are opened anew for each epoch, on data here or in object storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module, metadata
from itertools import count
from pathlib import Path

from fastsiam.bench.contest import Work
from fastsiam.bench.contestants.streaming import Job
from fastsiam.bench.streaming import STREAMING
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import FastSiamError
from fastsiam.pipelines import build_loader
from fastsiam.views.batch import Loader


def build_reading(
    *,
    data: DataConfig,
    augment: AugmentConfig,
    batch: int,
    images: int,
    environment: Mapping[str, str],
    cold: bool,
) -> dict[str, Work]:
    """Build a pipeline; its work is an epoch of "views".

    Args:
        data: its cache is emptied before each epoch if that is to be ``cold``.
        augment: ranges and probabilities.
        batch: images of a batch.
        images: of an epoch, whole batches.
        environment: variables by which the data are found.
        cold: whether nothing is kept from one epoch to the next.
    """
    os.environ.update(environment)
    opened: list[Loader] = []

    def open_anew() -> None:
        for loader in opened:
            loader.close()
        opened.clear()
        if cold and data.cache:
            shutil.rmtree(data.cache, ignore_errors=True)
        opened.append(build_loader(data, augment, batch=batch))
        if opened[0].steps != images // batch:
            raise RuntimeError(f"{opened[0].source} holds {opened[0].images:,} images")

    def run() -> None:
        if not opened:
            open_anew()
        for _ in opened[0].epoch(0):
            pass

    return {"views": Work(run, images, before=open_anew)}


def build_streaming(
    *, peer: str, job: Job, images: int, environment: Mapping[str, str], cold: bool
) -> dict[str, Work]:
    """Build another library's way to read the same images; its work is an epoch of "views".

    Args:
        peer: its name in ``STREAMING``.
        job: what it is to do; its cache is emptied before each epoch if that is to be ``cold``.
        images: of an epoch.
        environment: variables by which the data are found.
        cold: whether nothing is kept from one epoch to the next.
    """
    os.environ.update(environment)
    about = STREAMING[peer]
    if reason := about.missing:
        raise FastSiamError(f"{about.title} is not installed: {reason}")
    module = import_module(f"fastsiam.bench.contestants.streaming.{about.module}")
    own, turns = job, count()

    def open_anew() -> None:
        nonlocal own
        if cold and job.cache:
            shutil.rmtree(job.cache, ignore_errors=True)
            own = replace(job, cache=f"{job.cache}/{next(turns)}")
        if own.cache:
            Path(own.cache).mkdir(parents=True, exist_ok=True)

    def run() -> None:
        shown = sum(len(batch[0]) for batch in module.epoch(own))
        if shown < images // job.batch * job.batch:
            raise RuntimeError(f"it showed {shown:,} of {images:,} images")

    open_anew()
    facts = {"differs": about.differs, "version": metadata.version(about.packages[0])}
    return {"views": Work(run, images, lambda: facts, before=open_anew)}
