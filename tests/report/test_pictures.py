"""Pictures: every view is shown, whatever its side; files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import FastSiamError
from fastsiam.report.pictures import check_picture, contact_sheet, picture_rows, save_picture


def test_a_sheet_shows_every_view_whatever_its_side() -> None:
    """Two images, three views each: 128, 128 and 48 pixels, in plain colours of their own."""
    colours = [[(200, 0, 0), (0, 200, 0), (0, 0, 200)], [(99, 0, 0), (0, 99, 0), (0, 0, 99)]]
    sides = (128, 128, 48)
    views = [
        np.stack([np.full((side, side, 3), colours[image][view], np.uint8) for image in range(2)])
        for view, side in enumerate(sides)
    ]
    sources = [Image.new("RGB", (64, 32), "gray")] * 2
    named = list(zip(("dali 1", "dali 2", "dali 3"), views, strict=True))
    sheet = np.asarray(contact_sheet(sources, named, columns=1))
    assert sheet.shape == (14 + 2 * (128 + 8), 4 * 128 + 5 * 4, 3)
    for image in range(2):
        for view in range(3):
            row = 14 + image * (128 + 8) + 4 + 64
            column = 4 + (view + 1) * (128 + 4) + 64
            assert tuple(sheet[row, column]) == colours[image][view]
            assert tuple(sheet[row, column - 63]) == colours[image][view]  # as large as fits


def test_every_column_has_its_name() -> None:
    """As if each stood alone: source and views once more for the second image of a row."""
    views = [np.full((2, 96, 96, 3), 255, np.uint8)] * 2
    sources = [Image.new("RGB", (96, 96), "white")] * 2

    def heads(*names: str) -> np.ndarray:
        sheet = contact_sheet(sources, list(zip(names, views, strict=True)), columns=2)
        assert (np.asarray(sheet)[14:] == 255).all()
        return np.asarray(sheet)[:14, :, 0]

    named, empty = heads("ffcv 1", "ffcv 2"), heads("", "")
    for column in range(6):
        own = slice(4 + column * 100 + column // 3 * 4, 100 + column * 100 + column // 3 * 4)
        assert (named[:, own] < 128).any()
        assert (empty[:, own] < 128).any() == (column % 3 == 0)  # the source has its name
    assert (named[:, 104:200] != named[:, 204:300]).any()


def test_news_is_green_or_red_or_neither() -> None:
    picture = Image.new("RGB", (8, 8), "white")
    for good, strongest in ((True, 1), (False, 0), (None, None)):
        sheet = np.asarray(picture_rows([[(picture, "text", good)]])).astype(int)
        ink = sheet[(sheet < 250).any(2)].mean(0)
        if strongest is None:
            assert np.ptp(ink) == 0
        else:
            assert ink.argmax() == strongest and np.ptp(ink) > 50


def test_a_picture_has_the_kind_of_its_ending(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8), "red")
    for name, kind in (("a.png", "PNG"), ("b.JPG", "JPEG")):
        check_picture(tmp_path / name)
        save_picture(picture, tmp_path / "new" / name)
        with Image.open(tmp_path / "new" / name) as read:
            assert read.format == kind and read.size == (8, 8)
    for name in ("a.xyz", "png", "a.psd"):  # PIL reads the last, and does not write it
        with pytest.raises(ValueError, match="no picture's ending"):
            check_picture(tmp_path / name)


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FastSiamError, match=r"^cannot write .*file/a\.png: .+$"):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / "file" / "a.png")
