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

Captioned = tuple[Image.Image, str, bool | None]
"""A picture, the text below it, and whether that is good news; None where it is neither."""

_GAP, _LINE = 4, 14
_NEWS = {None: (60, 60, 60), True: (0, 110, 0), False: (190, 0, 0)}
"""Colours of texts: plain, good news, bad news."""


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
    sources: Sequence[Image.Image],
    views: Sequence[tuple[str, NDArray[np.uint8]]],
    *,
    columns: int,
) -> Image.Image:
    """Arrange rows of a source and its views, below a line with what the views are.

    Args:
        sources: N images of any size; shown shrunk, with a border that keeps their shape.
        views: names, and arrays (N, S, S, 3) uint8 that are shown beside the sources in their
            order; S may differ.
        columns: sources in a row.
    """
    names, arrays = ["source", *(name for name, _ in views)], [array for _, array in views]
    cell, shown = max(96, *(array.shape[1] for array in arrays)), 1 + len(views)
    width, height = shown * cell + (shown + 1) * _GAP, cell + 2 * _GAP
    columns, rows = min(columns, len(sources)), -(-len(sources) // columns)
    sheet = Image.new("RGB", (columns * width, _LINE + rows * height), "white")
    for place in range(columns * shown):
        left = place // shown * width + _GAP + place % shown * (cell + _GAP)
        _write(sheet, names[place % shown], left, _GAP // 2, cell)
    for i, source in enumerate(sources):
        left, top = (i % columns) * width + _GAP, _LINE + (i // columns) * height + _GAP
        pictures = [source, *(Image.fromarray(array[i]) for array in arrays)]
        for place, picture in enumerate(pictures):
            _paste(sheet, picture, left + place * (cell + _GAP), top, cell)
    return sheet


def picture_rows(rows: Sequence[Sequence[Captioned]]) -> Image.Image:
    """Arrange rows of pictures of any size with a line of text below each.

    The first of a row stands apart. Good news is green, bad news is red.
    """
    cell, apart = 112, 12
    width, height = cell + 2 * _GAP, cell + _LINE + 2 * _GAP
    size = width * max(map(len, rows)) + apart, height * len(rows)
    sheet = Image.new("RGB", size, "white")
    for y, row in enumerate(rows):
        for x, (picture, text, good) in enumerate(row):
            left, top = x * width + _GAP + apart * (x > 0), y * height + _GAP
            _paste(sheet, picture, left, top, cell)
            _write(sheet, text, left, top + cell + 1, cell, good)
    return sheet


def _write(
    sheet: Image.Image, text: str, left: int, top: int, most: int, good: bool | None = None
) -> None:
    """Write a text, cut off where it takes more than so many pixels."""
    draw = ImageDraw.Draw(sheet)
    while text and draw.textlength(text) > most:
        text = text[:-1]
    draw.text((left, top), text, fill=_NEWS[good])


def _paste(sheet: Image.Image, picture: Image.Image, left: int, top: int, cell: int) -> None:
    """Put a picture into the middle of a square cell, as large as fits."""
    scale = cell / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    at = left + (cell - width) // 2, top + (cell - height) // 2
    sheet.paste(picture.resize((width, height), method), at)
