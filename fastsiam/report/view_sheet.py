"""Contact sheets of images next to their augmented views, as training sees them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import torch
from PIL import Image

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.contact_sheets import Captioned, denormalize, picture_grid
from fastsiam.errors import DataError
from fastsiam.pipelines import build_loader, open_training_images
from fastsiam.pipelines.automatic import with_pipeline
from fastsiam.views.batch import Batch


def show_views(
    sources: Sequence[DataConfig], augment: AugmentConfig, *, images: int, epoch: int, seed: int
) -> tuple[Image.Image, list[dict[str, Any]], list[str]]:
    """Draw the first images of an epoch next to their views from one or more pipelines.

    Args:
        sources: the same data, once for each pipeline to show.
        augment: settings of the augmentation.
        images: number of images; all if the data have fewer.

    Returns:
        The contact sheet, with the name of the pipeline below each view; the path, position, label
        and view parameters of each image; the names of the pipelines.

    Raises:
        FastSiamError: a pipeline cannot produce the views.
    """
    store = open_training_images(sources[0], batch=1)
    images = min(images, len(store))
    cpu = torch.device("cpu")
    sources = [with_pipeline(source, store, cpu) for source in sources]
    batches = [_first_batch(x, augment, images=images, epoch=epoch, seed=seed) for x in sources]
    views = [
        (f"{source.pipeline} {number}", denormalize(view, augment.mean, augment.std))
        for source, batch in zip(sources, batches, strict=True)
        for number, view in enumerate(batch.views, 1)
    ]
    index = batches[0].index.tolist()
    pictures = [store.decode(i) for i in index]
    groups: list[list[Captioned]] = [
        [(source, "source", None), *((Image.fromarray(x[row]), name, None) for name, x in views)]
        for row, source in enumerate(pictures)
    ]
    side = max(96, *(array.shape[1] for _, array in views))
    sheet = picture_grid(groups, columns=max(1, 8 // len(views)), side=side)
    params = batches[0].params
    assert params is not None
    record = [
        {
            "path": store.where(i),
            "index": i,
            "label": int(store.labels[i]),
            "views": [
                {f.name: getattr(params, f.name)[view, row].tolist() for f in fields(params)}
                for view in range(len(augment.views))
            ],
        }
        for row, i in enumerate(index)
    ]
    return sheet, record, [source.pipeline for source in sources]


def _first_batch(
    source: DataConfig, augment: AugmentConfig, *, images: int, epoch: int, seed: int
) -> Batch:
    """Load the first images of an epoch by a pipeline; raise if one cannot be decoded."""
    if not source.loads_images:
        raise DataError(f"the {source.pipeline} pipeline has no images to show")
    strict_source = replace(source, bad_images="stop")
    with closing(build_loader(strict_source, augment, batch=images, seed=seed)) as loader:
        return next(iter(loader.epoch(epoch)))
