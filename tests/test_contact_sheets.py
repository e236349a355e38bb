"""Picture sheets: views of any size are shown, and the file extension sets the format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.contact_sheets import Captioned, check_picture, picture_grid, save_picture


def test_picture_grid_accepts_different_sizes() -> None:
    """Two groups of four single-colour pictures; the last is smaller and has no caption."""
    colours = [[(200, 0, 0), (0, 200, 0), (0, 0, 200)], [(99, 0, 0), (0, 99, 0), (0, 0, 99)]]
    looks = list(zip((128, 128, 48), ("dali 1", "dali\n2", ""), range(3), strict=True))
    groups: list[list[Captioned]] = [
        [
            (Image.new("RGB", (64, 32), "gray"), "source", None),
            *((Image.new("RGB", (side, side), row[i]), text, None) for side, text, i in looks),
        ]
        for row in colours
    ]
    for columns in (1, 2):
        sheet = np.asarray(picture_grid(groups, columns=columns, side=128))
        height, width = 128 + 14 + 2 * 4, 4 * (128 + 4) + 2 * 8
        assert sheet.shape == (2 * height // columns, columns * width, 3)
        for image in range(2):
            top = 4 + (height * image if columns == 1 else 0)
            for view in range(3):
                left = 4 + 8 + (view + 1) * 132 + (width * image if columns == 2 else 0)
                tile = sheet[top : top + 128, left : left + 128]
                assert (tile == colours[image][view]).all()  # scaled to fit
                name = sheet[top + 129 : top + 142, left : left + 128]
                assert (name < 128).any() == (view < 2)


def test_picture_format_follows_extension(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8), "red")
    for name, kind in (("a.png", "PNG"), ("b.JPG", "JPEG")):
        check_picture(tmp_path / name)
        save_picture(picture, tmp_path / "new" / name)
        with Image.open(tmp_path / "new" / name) as image:
            assert image.format == kind and image.size == (8, 8)
    for name in ("a.xyz", "png", "a.psd"):  # PIL can read PSD but not write it
        with pytest.raises(ValueError, match="has no extension of a picture format"):
            check_picture(tmp_path / name)
