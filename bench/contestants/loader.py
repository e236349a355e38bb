"""Pipelines at work: an epoch after the other, to uint8 crops and to finished views."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

from fastsiam.bench.contest import Work
from fastsiam.bench.measure import children
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import BASELINE
from fastsiam.views.batch import CropLoader


def build_loading(
    *, data: DataConfig, augment: AugmentConfig, batch: int, images: int, device: str
) -> dict[str, Work]:
    """Build a pipeline; its work is an epoch, to "crops" and to "views"."""
    loader, epochs = build_loader(data, augment, batch=batch, device=device), count()
    if loader.steps != images // batch:
        raise RuntimeError(f"{loader.source} holds {loader.images:,} images, not {images:,}")

    def through(epoch: Callable[[int], Iterable[object]]) -> None:
        for _ in epoch(next(epochs)):
            pass
        started = len(children(os.getpid()))
        if data.pipeline == BASELINE and started < data.workers:
            raise RuntimeError(f"{started} of {data.workers} workers started")

    def facts() -> dict[str, Any]:
        return {"workers": data.workers, "processes": 1 + len(children(os.getpid()))}

    work = {"views": Work(partial(through, loader.epoch), images, facts)}
    if isinstance(loader, CropLoader):
        work = {"crops": Work(partial(through, loader.crops), images, facts)} | work
    return work


def build_plain_crops(*, augment: AugmentConfig, **settings: Any) -> dict[str, Work]:
    """Build a pipeline that makes no uint8 crops; its crops are views without colours and blur."""
    plain = augment.changed(jitter_p=0.0, gray_p=0.0, blur_p=0.0, solarise_p=0.0)
    return {"crops": build_loading(augment=plain, **settings)["views"]}
