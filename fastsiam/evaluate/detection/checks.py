"""What annotations have to hold to: boxes that lie in their image, images that are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fastsiam.errors import DataError

from .archives import Files

SLACK = 0.1
"""Share of an image's side by which a box may reach over its edge, as those drawn by hand do."""
EMPTY = "is empty"
"""What ``fault_of`` says of a box without an area."""


def fault_of(box: Sequence[float], height: int, width: int) -> str:
    """Say what is wrong with a box of x0, y0, x1, y1, "" if nothing is.

    Args:
        box: 0-based, in pixels.
        height: of the image.
        width: of the image.
    """
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)):
        return "is not finite"
    if x1 < x0 or y1 < y0:
        return "has its corners reversed"
    outside = f"lies outside its image, which is {width} x {height}"
    if max(-x0, x1 - width) > SLACK * width or max(-y0, y1 - height) > SLACK * height:
        return outside
    if np.float32(x1) == np.float32(x0) or np.float32(y1) == np.float32(y0):  # as it is kept
        return EMPTY
    return outside if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0 else ""


def check_size(where: str, height: object, width: object) -> tuple[int, int]:
    """Return the height and width of an image as whole numbers of pixels.

    Raises:
        DataError: they are none.
    """
    try:
        size = int(height), int(width)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        size = (0, 0)
    if not all(0 < side <= 2**16 for side in size):
        raise DataError(f"{where} says of its image that it is {width!r} x {height!r} pixels")
    return size


def check_images(files: Files, names: Iterable[str], said_by: str) -> None:
    """Refuse annotations of images that are not there.

    Raises:
        DataError: names the first, and says how many there are.
    """
    missing = [name for name in names if name not in files]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"{files.where(missing[0])}{more}: not there, but annotated by {said_by}; "
            "unpack or fetch the images again"
        )
