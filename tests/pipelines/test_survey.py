"""What a run says of its images before it starts: orientation, transparency, bit depth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.pipelines import open_split, survey
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.sources import picture, rotated_jpeg


def test_a_run_says_once_what_its_options_affect(
    small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = images / "train" / "class0"
    (folder / "a.jpg").write_bytes(rotated_jpeg(0))
    picture(1).convert("RGBA").save(folder / "b.png")
    Image.fromarray(np.zeros((30, 40), np.uint16)).save(folder / "c.png")
    store = open_split(DataConfig(data=str(images)), "val")
    assert survey.survey(store, store.rules) == []  # ordinary images are not worth a line
    config = with_settings(small, epochs=1, knn_every=0)
    train_here(config, "demo")
    text = capfd.readouterr().err
    for line in (
        "1 of 27 sampled images have an EXIF orientation, which is ignored; --exif apply",
        "1 of 27 sampled images have transparency, which is dropped; --alpha white",
        "1 of 27 sampled images have 16-bit or float pixels, which are scaled",
    ):
        assert text.count(line) == 1
    out = str(images / "other")
    train_here(with_settings(config, exif="apply", alpha="black", out=out), "demo")
    text = capfd.readouterr().err
    assert "which --exif apply turns upright" in text and "are laid over black" in text
