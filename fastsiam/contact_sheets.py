"""Contact sheets: images next to their augmented views, or next to their nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from fastsiam.errors import FastSiamError, as_one_line
from fastsiam.files import atomic_write_for_user, quote

if TYPE_CHECKING:
    from torch import Tensor

Captioned = tuple[Image.Image, str, bool | None]
"""A picture, its caption, and whether that is good news (True), bad news (False) or neither."""

_GAP, _APART, _LINE = 4, 8, 14
"""In pixels: gap between pictures, extra gap after a group's first picture, height of a caption."""
_NEWS = {None: (60, 60, 60), True: (0, 110, 0), False: (190, 0, 0)}
"""Caption colours for neither, good news and bad news."""


def check_picture(path: Path) -> None:
    """Check, before a picture is drawn, that its file extension is a known picture format.

    Raises:
        ValueError: Pillow cannot write files with this extension.
    """
    Image.init()
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--out {quote(path)} has no extension of a picture format; use .png")


def check_outside(path: Path, places: Iterable[object]) -> None:
    """Check that a picture will not be written into a folder of images, of which it would be one.

    Raises:
        FastSiamError: ``path`` is inside one of the ``places``.
    """
    for place in places:
        if isinstance(place, Path) and path.resolve().is_relative_to(place.resolve()):
            raise FastSiamError(
                f"--out {quote(path)} is in the folder of images {quote(place)}, and would be "
                "one of them: choose another folder"
            )


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture in the format of the path's file extension.

    Raises:
        FastSiamError: the file cannot be written.
    """
    with atomic_write_for_user(path) as temporary:
        picture.save(temporary, format=Image.registered_extensions()[path.suffix.lower()])


def denormalize(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.uint8]:
    """Undo the normalisation of views: (N, 3, S, S) float to (N, S, S, 3) uint8."""
    x = views.float().cpu().permute(0, 2, 3, 1).numpy()
    return np.rint((x * std + mean) * 255).clip(0, 255).astype(np.uint8)


def picture_grid(
    groups: Sequence[Sequence[Captioned]], *, columns: int = 1, side: int = 112
) -> Image.Image:
    """Arrange groups of pictures in a grid, with a caption below each picture.

    A row has at most ``columns`` groups. Pictures of any size are scaled to fit into squares of
    ``side`` pixels. The first one of each group is set apart from the others.
    """
    columns = min(columns, len(groups))
    step, height = side + _GAP, side + _LINE + 2 * _GAP
    width = step * max(map(len, groups)) + 2 * _APART
    sheet = Image.new("RGB", (columns * width, -(-len(groups) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, group in enumerate(groups):
        for place, (picture, text, good) in enumerate(group):
            left = i % columns * width + _GAP + place * step + _APART * (place > 0)
            top = i // columns * height + _GAP
            is_enlarged = max(picture.size) < side
            method = Image.Resampling.NEAREST if is_enlarged else Image.Resampling.LANCZOS
            sheet.paste(ImageOps.pad(picture, (side, side), method, "white"), (left, top))
            text = as_one_line(text)
            while text and draw.textlength(text) > side:
                text = text[:-1]
            draw.text((left, top + side + 1), text, fill=_NEWS[good])
    return sheet
