"""Which data set lies at a path, and the messages where it is no data set or several."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from fastsiam.pipelines.store import open_store
from tests.conftest import write_images
from tests.conversions import run
from tests.sources import WNIDS, jpeg, tar


def test_a_word_within_a_name_tells_no_split(tmp_path: Path) -> None:
    tar(tmp_path / "carnival.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / "._train.tar").write_bytes(b"made by another system")
    assert len(open_store(tmp_path, "train")) == 1


def test_kaggles_layout_and_other_names_of_splits(tmp_path: Path) -> None:
    for wnid in WNIDS:
        path = tmp_path / "kaggle" / "ILSVRC/Data/CLS-LOC/train" / wnid / "0.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(jpeg(0))
    assert open_store(tmp_path / "kaggle", "train").classes == WNIDS
    write_images(tmp_path / "mixed" / "Train", each=2)
    write_images(tmp_path / "mixed" / "Validation", each=1)
    assert len(open_store(tmp_path / "mixed", "train")) == 6
    assert len(open_store(tmp_path / "mixed", "val")) == 3


def test_a_converted_file_among_originals_is_named(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in a process; nothing is said where there is nothing else to be meant."""
    caplog.set_level(logging.INFO)
    run("folder", images, tmp_path / "out", limit=5)
    assert len(open_store(tmp_path / "out", "train")) == 5 and not caplog.records
    for own in ("train.beton", "val.beton"):
        shutil.copy(tmp_path / "out" / own, images / own)
    tar(images / "more.tar", [("0.jpg", jpeg(0))])
    (images / "notes").mkdir()
    for _ in range(2):
        assert len(open_store(images, "train")) == len(open_store(images, "val")) == 5
    (said,) = (record.message for record in caplog.records)
    assert said.startswith(
        f"images from {images}/train.beton, not those beside it, such as {images}/"
    )
    run("folder", tmp_path / "out", tmp_path / "parts", part="1/1")
    sub = write_images(tmp_path / "parts" / "images" / "train", classes=1, each=1)
    assert len(open_store(sub.parents[1], "train")) == 5
    assert f"train.beton, not those beside it, such as {sub}" in caplog.records[-1].message
