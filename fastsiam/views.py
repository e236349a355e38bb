"""A contact sheet: images beside their two views, as a pipeline really makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fastsiam.config import AugmentConfig

_GAP = 4


def denormalize(views: Tensor, config: AugmentConfig) -> NDArray[np.uint8]:
    """Undo the normalisation: (N, 3, S, S) floats to (N, S, S, 3) uint8."""
    x = views.float().cpu().permute(0, 2, 3, 1).numpy()
    return np.rint((x * config.std + config.mean) * 255).clip(0, 255).astype(np.uint8)


def contact_sheet(
    sources: Sequence[Image.Image], views: Sequence[NDArray[np.uint8]], *, columns: int
) -> Image.Image:
    """Arrange rows of a source and its views.

    Args:
        sources: N images of any size; shown shrunk, with a border that keeps their shape.
        views: arrays (N, S, S, 3) uint8, shown beside the sources in their order.
        columns: sources in a row.
    """
    cell, shown = max(96, views[0].shape[1]), 1 + len(views)
    width, height = shown * cell + (shown + 1) * _GAP, cell + 2 * _GAP
    rows = -(-len(sources) // columns)
    sheet = Image.new("RGB", (min(columns, len(sources)) * width, rows * height), "white")
    for i, source in enumerate(sources):
        left, top = (i % columns) * width + _GAP, (i // columns) * height + _GAP
        pictures = [source, *(Image.fromarray(view[i]) for view in views)]
        for place, picture in enumerate(pictures):
            scale = cell / max(picture.size)
            size = [max(1, round(side * scale)) for side in picture.size]
            method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
            at = left + place * (cell + _GAP) + (cell - size[0]) // 2
            sheet.paste(
                picture.resize((size[0], size[1]), method), (at, top + (cell - size[1]) // 2)
            )
    return sheet
