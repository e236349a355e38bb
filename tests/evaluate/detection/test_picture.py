"""Pictures of detections beside the truth."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from fastsiam.evaluate.detection import open_detection
from fastsiam.evaluate.detection.picture import draw, sheet
from fastsiam.report.drawing import BLUE, GRAY, VERMILION
from tests.evaluate.detection.cases import Box, detections, picture

LEFT: Box = (10, 20, 50, 60)
RIGHT: Box = (60, 20, 90, 90)


def count(drawn: Image.Image, colour: str, half: int) -> int:
    """Count the pixels of a colour in the left (0) or the right half."""
    pixels = np.asarray(drawn)
    width = pixels.shape[1] // 2
    own = pixels[:, half * width : (half + 1) * width]
    return int((own == ImageColor.getrgb(colour)).all(-1).sum())


def test_truth_is_left_and_detections_are_right() -> None:
    image = Image.new("RGB", (100, 100), "white")
    truth = picture(1, [LEFT, RIGHT], [0, 1])
    found = detections(1, [LEFT, RIGHT], [0.9, 0.3], [0, 1])
    drawn = draw(image, truth, found, classes=("a", "b"))
    assert count(drawn, BLUE, 0) and count(drawn, VERMILION, 0) and count(drawn, BLUE, 1)
    assert not count(drawn, VERMILION, 1)  # not sure enough
    assert count(draw(image, truth, found, least=0.2), VERMILION, 1)


def test_a_box_is_drawn_where_it_is() -> None:
    image = Image.new("RGB", (100, 100), "white")
    drawn = np.asarray(draw(image, picture(1, [LEFT]), detections(1, [], [])))
    scale, below = 3.2, 14  # 320 pixels of 100, below a line of text
    ink = (drawn[:, :320] == ImageColor.getrgb(BLUE)).all(-1)
    rows, columns = np.nonzero(ink)
    assert (columns.min(), columns.max()) == (10 * scale, 50 * scale - 1)
    assert rows.max() == 60 * scale + below - 1
    assert ink[int(40 * scale) + below, int(10 * scale)] and not ink[int(40 * scale) + below, 80]


def test_what_is_ignored_is_gray() -> None:
    image = Image.new("RGB", (100, 100), "white")
    truth = picture(1, [LEFT, RIGHT], difficult=[0], crowd=[1])
    drawn = draw(image, truth, detections(1, [], []))
    assert count(drawn, GRAY, 0) and not count(drawn, BLUE, 0)


def test_masks_tint_what_they_cover(coco: None) -> None:
    image = Image.new("RGB", (100, 100), "white")
    mask = [np.array([10.0, 20, 50, 20, 50, 60, 10, 60])]
    plain = draw(image, picture(1, [LEFT]), detections(1, [], []))
    tinted = draw(image, picture(1, [LEFT], masks=(mask,)), detections(1, [], []))
    inside = (int(30 * 3.2), int(50 * 3.2))
    assert plain.getpixel(inside) == (255, 255, 255) != tinted.getpixel(inside)


def test_a_sheet_of_made_pictures(made: Path, coco: None) -> None:
    opened = open_detection("coco", made / "coco", "val")
    drawn = []
    for i, one in enumerate(opened.pictures()):
        found = detections(one.image_id, one.boxes, np.ones(len(one)), one.labels, one.masks)
        with Image.open(io.BytesIO(opened.read(i))) as image:
            drawn.append(draw(image, one, found, classes=opened.classes))
    arranged = sheet(drawn, columns=2)
    assert arranged.height >= sum(one.height for one in drawn[::2])
    assert arranged.width >= 2 * max(one.width for one in drawn)
    with pytest.raises(ValueError, match="no picture"):
        sheet([])
