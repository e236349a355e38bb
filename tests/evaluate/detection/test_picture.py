"""Pictures of detections beside the truth."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageColor

from fastsiam.evaluate.detection.picture import SIDE, draw
from fastsiam.report.drawing import BLUE, GRAY, VERMILION
from tests.evaluate.detection.cases import Box, detections, picture

LEFT: Box = (10, 20, 50, 60)
RIGHT: Box = (60, 20, 90, 90)
WHITE = Image.new("RGB", (100, 100), "white")


def where(drawn: Image.Image, colour: str) -> np.ndarray:
    """Return rows and columns of the pixels of a colour."""
    assert drawn.size == (SIDE, SIDE)
    return np.argwhere((np.asarray(drawn) == ImageColor.getrgb(colour)).all(-1))


def test_objects_and_detections_that_are_sure() -> None:
    truth = picture(1, [LEFT, RIGHT], [0, 1])
    found = detections(1, [LEFT, RIGHT], [0.9, 0.3], [0, 1])
    (there, title, _), (seen, count, _) = draw(WHITE, truth, found, classes=("a", "b"))
    assert (title, count) == ("truth: 2", "found: 1")
    assert len(where(there, BLUE)) and len(where(there, VERMILION)) and len(where(seen, BLUE))
    assert not len(where(seen, VERMILION))


def test_a_box_is_drawn_where_it_is() -> None:
    (there, _, _), (seen, _, _) = draw(
        WHITE, picture(1, [LEFT]), detections(1, [], []), classes=("a",)
    )
    ink = where(there, BLUE)
    scale = SIDE / 100
    assert np.abs(ink.min(0) - np.array([20, 10]) * scale).max() <= 1
    assert np.abs(ink.max(0) - np.array([60, 50]) * scale).max() <= 1
    assert seen.getextrema() == ((255, 255),) * 3


def test_what_is_ignored_is_gray() -> None:
    truth = picture(1, [LEFT, RIGHT], difficult=[0], crowd=[1])
    (there, _, _), _ = draw(WHITE, truth, detections(1, [], []), classes=("a", "b"))
    assert len(where(there, GRAY)) and not len(where(there, BLUE))


def test_masks_tint_what_they_cover(coco: None) -> None:
    mask = [np.array([10.0, 20, 50, 20, 50, 60, 10, 60])]
    nothing = detections(1, [], [])
    (plain, _, _), _ = draw(WHITE, picture(1, [LEFT]), nothing, classes=("a",))
    (tinted, _, _), _ = draw(WHITE, picture(1, [LEFT], masks=(mask,)), nothing, classes=("a",))
    inside = (int(30 * 3.2), int(50 * 3.2))
    assert plain.getpixel(inside) == (255, 255, 255) != tinted.getpixel(inside)
