"""Messages about images before a run starts: orientation, transparency and bit depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fastsiam.config import DataConfig
from fastsiam.pipelines import open_split
from fastsiam.pipelines.store.decode import ImageRules
from fastsiam.pipelines.survey import survey
from tests.sources import picture, rotated_jpeg


def test_survey_reports_images_affected_by_options(images: Path) -> None:
    folder = images / "train" / "class0"
    (folder / "a.jpg").write_bytes(rotated_jpeg(0))
    picture(1).convert("RGBA").save(folder / "b.png")
    Image.fromarray(np.zeros((30, 40), np.uint16)).save(folder / "c.png")
    store = open_split(DataConfig(data=str(images)), "val")
    assert survey(store, store.rules) == []  # ordinary images need no message
    store = open_split(DataConfig(data=str(images)), "train")
    for rules, exif, alpha in (
        (store.rules, "ignored; --exif apply turns them upright", "dropped; --alpha white or"),
        (ImageRules("apply", "black"), "which is applied", "are drawn over black"),
    ):
        lines = survey(store, rules)
        assert all(line.startswith("1 of 27 sampled images have ") for line in lines)
        expected = ("an EXIF orientation", exif), ("transparency", alpha), ("16-bit or", "8 bits")
        for line, words in zip(lines, expected, strict=True):
            assert all(word in line for word in words)
