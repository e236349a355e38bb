"""Images beside the views that pipelines make of them, as training sees them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import build_loader, open_split
from fastsiam.pipelines.automatic import choose_pipeline, settled
from fastsiam.report.pictures import contact_sheet, denormalize
from fastsiam.views.draws import draw_views

log = logging.getLogger(__name__)


def show_views(
    sources: Sequence[DataConfig], augment: AugmentConfig, *, images: int, epoch: int, seed: int
) -> tuple[Image.Image, list[dict[str, Any]]]:
    """Draw the first images of an epoch beside the views that pipelines make of them.

    Args:
        sources: the same data, by one pipeline or more.
        augment: what becomes of the images.
        images: how many; fewer where the data hold fewer.
        epoch: whose first images and draws are shown.
        seed: of the run.

    Returns:
        The contact sheet; for each image its path, position, label and the parameters of its views.
    """
    if not all(source.loads_images for source in sources):
        raise DataError("the synthetic pipeline has no images to show")
    sources, store = list(sources), open_split(sources[0], "train")
    here = torch.device("cpu")
    for number, source in enumerate(sources):
        if source.pipeline == "auto":
            choice = choose_pipeline(source, store, device=here, keeps=False)
            log.info(choice)
            sources[number] = settled(source, choice.name)
    images = min(images, len(store))
    views: list[NDArray[np.uint8]] = []
    for source in sources:
        loader = build_loader(source, augment, batch=images, seed=seed)
        try:
            batch = next(iter(loader.epoch(epoch)))
        finally:
            loader.close()
        views += [denormalize(view, augment) for view in batch.views]
    index = batch.index.tolist()
    pictures = [store.decode(i) for i in index]
    sheet = contact_sheet(pictures, views, columns=max(1, 8 // len(views)))
    size = np.array([(picture.height, picture.width) for picture in pictures])
    params = draw_views(augment, seed=seed, epoch=epoch, index=index, size=size)
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
    return sheet, record
