"""Pictures of images: beside their views as a pipeline makes them, or beside their nearest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.files import written_for_user

_GAP = 4


def check_picture(path: Path) -> None:
    """Refuse a file whose name has no ending of a picture, before it is drawn.

    Raises:
        ValueError: says so.
    """
    Image.init()
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"{path}: no picture's ending; .png is one")


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture into a file of the kind that its ending says.

    Raises:
        FastSiamError: it cannot be written.
    """
    with written_for_user(path) as temporary:
        picture.save(temporary, format=Image.registered_extensions()[path.suffix.lower()])


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
        views: arrays (N, S, S, 3) uint8, shown beside the sources in their order; S may differ.
        columns: sources in a row.
    """
    cell, shown = max(96, *(view.shape[1] for view in views)), 1 + len(views)
    width, height = shown * cell + (shown + 1) * _GAP, cell + 2 * _GAP
    rows = -(-len(sources) // columns)
    sheet = Image.new("RGB", (min(columns, len(sources)) * width, rows * height), "white")
    for i, source in enumerate(sources):
        left, top = (i % columns) * width + _GAP, (i // columns) * height + _GAP
        pictures = [source, *(Image.fromarray(view[i]) for view in views)]
        for place, picture in enumerate(pictures):
            _paste(sheet, picture, left + place * (cell + _GAP), top, cell)
    return sheet


def picture_rows(rows: Sequence[Sequence[tuple[Image.Image, str, bool]]]) -> Image.Image:
    """Arrange rows of pictures with a line of text below each.

    Args:
        rows: pictures of any size, their texts, and whether the text is good news: green, not red.
            The first of a row stands apart.
    """
    cell, line, apart = 112, 14, 12
    width, height = cell + 2 * _GAP, cell + line + 2 * _GAP
    size = width * max(map(len, rows)) + apart, height * len(rows)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for y, row in enumerate(rows):
        for x, (picture, text, good) in enumerate(row):
            left, top = x * width + _GAP + apart * (x > 0), y * height + _GAP
            _paste(sheet, picture, left, top, cell)
            while text and draw.textlength(text) > cell:
                text = text[:-1]
            draw.text((left, top + cell + 1), text, fill=(0, 110, 0) if good else (190, 0, 0))
    return sheet


def _paste(sheet: Image.Image, picture: Image.Image, left: int, top: int, cell: int) -> None:
    """Put a picture into the middle of a square cell, as large as fits."""
    scale = cell / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    at = left + (cell - width) // 2, top + (cell - height) // 2
    sheet.paste(picture.resize((width, height), method), at)
