"""Pictures of what was found in images, beside what is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw

from fastsiam.report.drawing import BLUE, GRAY, GREEN, INK, ORANGE, PINK, SKY, VERMILION

from .annotations import Picture, Segmentation
from .masks import pixels
from .scores import Detections

LEAST = 0.5
"""Scores from which on detections are shown."""

_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY)
"""Of the classes, one after the other, and again from the first."""
_SIDE = 320
"""Pixels of the longer side of an image as it is shown."""
_GAP, _LINE = 8, 14
_OPACITY = 0.35


def draw(
    image: Image.Image,
    truth: Picture,
    detections: Detections,
    *,
    classes: Sequence[str] = (),
    least: float = LEAST,
) -> Image.Image:
    """Draw an image twice: with its objects on the left, with the detections on the right.

    Difficult objects and crowds are gray. A colour is a class's.

    Args:
        image: of the size that the truth says.
        truth: its objects.
        detections: in it.
        classes: names for the texts; their numbers stand for them otherwise.
        least: detections of a lower score are left out.

    Returns:
        RGB; each half's longer side has 320 pixels.

    Raises:
        BackendError: there are masks, and pycocotools is missing.
    """
    ignored = truth.difficult | truth.crowd
    there = [
        (
            _named(int(label), classes) + (" (ignored)" if gray else ""),
            GRAY if gray else _colour(int(label)),
        )
        for label, gray in zip(truth.labels, ignored, strict=True)
    ]
    order = [place for place in np.argsort(detections.scores) if detections.scores[place] >= least]
    found = [
        (
            f"{_named(int(detections.labels[i]), classes)} {detections.scores[i]:.2f}",
            _colour(int(detections.labels[i])),
        )
        for i in order
    ]
    masks = None if detections.masks is None else [detections.masks[i] for i in order]
    halves = [
        _half(image, f"truth: {len(there)}", truth.boxes, there, truth.masks),
        _half(image, f"found: {len(found)}", detections.boxes[order], found, masks),
    ]
    return _row(halves)


def sheet(pictures: Sequence[Image.Image], *, columns: int = 2) -> Image.Image:
    """Arrange pictures in rows, on white.

    Raises:
        ValueError: there is none.
    """
    if not pictures:
        raise ValueError("no picture to arrange")
    width = max(picture.width for picture in pictures) + _GAP
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in row) + _GAP for row in rows]
    arranged = Image.new("RGB", (width * min(columns, len(pictures)), sum(heights)), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            arranged.paste(picture, (x * width + _GAP // 2, sum(heights[:y]) + _GAP // 2))
    return arranged


def _half(
    image: Image.Image,
    title: str,
    boxes: NDArray[np.float32],
    texts: Sequence[tuple[str, str]],
    masks: Sequence[Segmentation] | None,
) -> Image.Image:
    """Draw an image with boxes, their texts and masks, below a title."""
    shown = np.asarray(image.convert("RGB"), np.float32)
    for mask, (_, colour) in zip(masks or (), texts, strict=masks is not None):
        covered = pixels(mask, image.height, image.width)
        tint = np.array(ImageColor.getrgb(colour), np.float32)
        shown = np.where(covered[..., None], (1 - _OPACITY) * shown + _OPACITY * tint, shown)
    scale = _SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    half = Image.new("RGB", (width, _LINE + height), "white")
    large = Image.fromarray(np.rint(shown).astype(np.uint8)).resize((width, height), method)
    pen = ImageDraw.Draw(large)
    for box, (text, colour) in zip(boxes, texts, strict=True):
        x0, y0, x1, y1 = (float(value) * scale for value in box)
        pen.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=colour, width=2)
        top = max(0.0, y0 - _LINE)
        pen.rectangle((x0, top, x0 + pen.textlength(text) + 3, top + _LINE), fill=colour)
        pen.text((x0 + 2, top + 1), text, fill="white")
    half.paste(large, (0, _LINE))
    ImageDraw.Draw(half).text((0, 0), title, fill=INK)
    return half


def _row(halves: Sequence[Image.Image]) -> Image.Image:
    width = sum(half.width for half in halves) + _GAP
    row = Image.new("RGB", (width, max(half.height for half in halves)), "white")
    row.paste(halves[0], (0, 0))
    row.paste(halves[1], (halves[0].width + _GAP, 0))
    return row


def _named(label: int, classes: Sequence[str]) -> str:
    return classes[label] if classes else str(label)


def _colour(label: int) -> str:
    return _COLOURS[label % len(_COLOURS)]
