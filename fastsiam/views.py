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
    sources: Sequence[Image.Image],
    view1: NDArray[np.uint8],
    view2: NDArray[np.uint8],
    *,
    columns: int = 4,
) -> Image.Image:
    """Arrange triples of source, first view and second view.

    Args:
        sources: N images of any size; shown shrunk, with a border that keeps their shape.
        view1: (N, S, S, 3) uint8.
        view2: (N, S, S, 3) uint8.
        columns: triples in a row.
    """
    cell = max(96, view1.shape[1])
    width, height = 3 * cell + 4 * _GAP, cell + 2 * _GAP
    rows = -(-len(sources) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for i, source in enumerate(sources):
        left, top = (i % columns) * width + _GAP, (i // columns) * height + _GAP
        for place, picture in enumerate(
            (source, Image.fromarray(view1[i]), Image.fromarray(view2[i]))
        ):
            scale = cell / max(picture.size)
            size = [max(1, round(side * scale)) for side in picture.size]
            method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
            at = left + place * (cell + _GAP) + (cell - size[0]) // 2
            sheet.paste(
                picture.resize((size[0], size[1]), method), (at, top + (cell - size[1]) // 2)
            )
    return sheet
