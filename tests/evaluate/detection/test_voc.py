"""PASCAL VOC: its folders, its pixels, and what is refused of it."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import DataError, NoSplitError
from fastsiam.evaluate.detection import Picture, open_detection
from fastsiam.evaluate.detection.voc import CLASSES

OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{0}</xmin>"
    "<ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>"
    "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
)


def annotation(*objects: str, size: str = "<width>60</width><height>40</height>") -> str:
    return f"<annotation><size>{size}</size>{''.join(objects)}</annotation>"


def thing(*corners: object, name: str = "dog", difficult: int = 0) -> str:
    return OBJECT.format(*corners, name=name, difficult=difficult)


def devkit(folder: Path, annotations: dict[str, str], year: int = 2007) -> Path:
    """Write a test split with these annotations, and a training split with the first."""
    root = folder / f"VOCdevkit/VOC{year}"
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / name).mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40)).save(buffer, "JPEG")
    for name, text in annotations.items():
        (root / f"Annotations/{name}.xml").write_text(text)
        (root / f"JPEGImages/{name}.jpg").write_bytes(buffer.getvalue())
    (root / "ImageSets/Main/test.txt").write_text("".join(f"{name}\n" for name in annotations))
    (root / "ImageSets/Main/trainval.txt").write_text(f"{next(iter(annotations))}\n")
    return folder


def test_pixels_are_counted_from_zero(tmp_path: Path) -> None:
    """A box of the whole image is (1, 1, width, height) to VOC, and (0, 0, width, height) here."""
    whole, one = thing(1, 1, 60, 40), thing(5, 6, 5, 6, name="cat", difficult=1)
    devkit(tmp_path, {"000012": annotation(whole, one), "2008_000003": annotation()})
    opened = open_detection("voc07", tmp_path, "val")
    assert opened.classes == CLASSES and len(CLASSES) == 20 and len(opened) == 2
    first, second = opened.pictures()
    assert first.boxes.tolist() == [[0, 0, 60, 40], [4, 5, 5, 6]]
    assert first.boxes.dtype == np.float32 and first.areas.tolist() == [2400, 1]
    assert [CLASSES[label] for label in first.labels] == ["dog", "cat"]
    assert first.difficult.tolist() == [False, True] and not first.crowd.any()
    assert (first.file, first.height, first.width) == ("VOC2007/JPEGImages/000012.jpg", 40, 60)
    assert (first.image_id, second.image_id) == (12, 2008000003)
    assert second.boxes.shape == (0, 4) and len(second) == 0 and second.masks is None


def test_fractions_and_a_pixel_too_many_are_taken(tmp_path: Path) -> None:
    """Some of VOC's boxes are so."""
    devkit(tmp_path, {"000001": annotation(thing(0, 2.5, 61, 40.0))})
    assert open_detection("voc07", tmp_path, "val").picture(0).boxes.tolist() == [[-1, 1.5, 61, 40]]


def same(first: Picture, second: Picture) -> bool:
    return all(
        np.array_equal(one, other)
        for one, other in zip(vars(first).values(), vars(second).values(), strict=True)
    )


def test_where_the_data_may_lie(made: Path, tmp_path: Path) -> None:
    """VOCdevkit's folder, or VOCdevkit itself; what is still packed is named."""
    stamps = {open_detection("voc0712", made / "voc", "train").stamp}
    stamps.add(open_detection("voc0712", made / "voc/VOCdevkit", "train").stamp)
    assert len(stamps) == 1
    assert len(open_detection("voc0712", made / "voc", "train")) == 12
    (tmp_path / "VOCtest_06-Nov-2007.tar").write_bytes(b"")
    with pytest.raises(NoSplitError, match=r"unpack it first, by tar -C .*VOCtest_06"):
        open_detection("voc07", tmp_path, "val")


def test_the_stamp_changes_with_the_data(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "voc", tmp_path / "voc")

    def stamp() -> str:
        return open_detection("voc07", tmp_path / "voc", "val").stamp

    before = stamp()
    assert stamp() == before
    image = next((tmp_path / "voc/VOCdevkit/VOC2007/JPEGImages").glob("000012.jpg"))
    os.utime(image, ns=(1, 1))
    touched = stamp()
    path = tmp_path / "voc/VOCdevkit/VOC2007/Annotations/000012.xml"
    path.write_text(path.read_text().replace("<difficult>0", "<difficult>1"))
    assert len({before, touched, stamp()}) == 3


def test_own_classes(tmp_path: Path) -> None:
    devkit(tmp_path, {"000001": annotation(thing(1, 1, 9, 9, name="zebra"))})
    with pytest.raises(DataError, match=r"object 1 \(zebra\) is of no known class"):
        open_detection("voc07", tmp_path, "val")
    (tmp_path / "VOCdevkit/classes.txt").write_text("lion\nzebra\n")
    opened = open_detection("voc07", tmp_path, "val")
    assert opened.classes == ("lion", "zebra") and opened.picture(0).labels.tolist() == [1]
    (tmp_path / "VOCdevkit/classes.txt").write_text("zebra\nzebra\n")
    with pytest.raises(DataError, match="each class once"):
        open_detection("voc07", tmp_path, "val")


BAD = {
    "empty": (annotation(thing(5, 5, 4, 9)), "object 1 .*xmin 5.* is empty"),
    "reversed": (annotation(thing(1, 1, 9, 9), thing(9, 1, 5, 9)), "object 2 .* reversed"),
    "nan": (annotation(thing("nan", 1, 5, 9)), "object 1 .* not finite"),
    "infinite": (annotation(thing(1, 1, "1e999", 9)), "object 1 .* not finite"),
    "outside": (annotation(thing(70, 1, 90, 9)), "object 1 .* outside its image, .* 60 x 40"),
    "far over the edge": (annotation(thing(1, 1, 80, 9)), "object 1 .* outside"),
    "no number": (annotation(thing("x", 1, 5, 9)), "object 1 .* no whole box"),
    "no box": (annotation("<object><name>dog</name></object>"), "object 1 .* no whole box"),
    "class": (annotation(thing(1, 1, 9, 9, name="dragon")), "dragon.* no known class"),
    "no class": (annotation(thing(1, 1, 9, 9, name="")), "no known class"),
    "mark": (annotation(thing(1, 1, 9, 9, difficult="x")), "object 1 .* mark"),  # type: ignore[arg-type]
    "no size": (annotation(size=""), "None x None"),
    "size": (annotation(size="<width>0</width><height>4</height>"), "'0' x '4'"),
    "cut": (annotation(thing(1, 1, 9, 9))[:80], "no whole XML"),
    "no XML": ("\0\1", "no whole XML"),
    "nothing": ("", "no whole XML"),
    "encoding": ('<?xml version="1.0" encoding="x-none"?><annotation/>', "no whole XML"),
    "entities": (
        '<!DOCTYPE a [<!ENTITY x "dog"><!ENTITY y "&x;&x;&x;">]><annotation>&y;</annotation>',
        "document type",
    ),
    "a .beton file": (
        '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>',
        "document type",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_one_line_names_the_file_and_the_object(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    devkit(tmp_path, {"000001": annotation(thing(1, 1, 9, 9)), "000002": text})
    with pytest.raises(DataError, match=message) as caught:
        open_detection("voc07", tmp_path, "val")
    assert "VOC2007/Annotations/000002.xml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data at"):
        open_detection("voc07", tmp_path / "nowhere", "train")
    with pytest.raises(NoSplitError, match=r"Main/trainval\.txt, which VOCtrainval_06-Nov"):
        open_detection("voc07", tmp_path, "train")
    shutil.copytree(made / "voc", tmp_path / "voc")
    root = tmp_path / "voc/VOCdevkit/VOC2007"
    for name in ("000013", "000014"):
        (root / f"JPEGImages/{name}.jpg").unlink()
    with pytest.raises(DataError, match=r"000013\.jpg and 1 more: not there"):
        open_detection("voc07", tmp_path / "voc", "val")
    (root / "Annotations/000015.xml").unlink()
    with pytest.raises(DataError, match=r"000015\.xml: not there"):
        open_detection("voc07", tmp_path / "voc", "val")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a", "1" * 5000, "1_2_3"])
def test_lists_name_no_other_files(name: str, tmp_path: Path) -> None:
    devkit(tmp_path, {"000001": annotation()})
    (tmp_path / "VOCdevkit/VOC2007/ImageSets/Main/test.txt").write_text(f"{name}\n")
    with pytest.raises(DataError, match="VOC's names are numbers"):
        open_detection("voc07", tmp_path, "val")


def test_an_image_listed_twice_is_refused(tmp_path: Path) -> None:
    devkit(tmp_path, {"000001": annotation()})
    (tmp_path / "VOCdevkit/VOC2007/ImageSets/Main/test.txt").write_text("000001\n000001\n")
    with pytest.raises(DataError, match="two images with the number 1"):
        open_detection("voc07", tmp_path, "val")


def test_an_image_that_goes_away_is_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "voc", tmp_path / "voc")
    opened = open_detection("voc07", tmp_path / "voc", "val")
    (tmp_path / "voc/VOCdevkit/VOC2007" / "JPEGImages/000012.jpg").unlink()
    with pytest.raises(DataError, match=r"000012\.jpg"):
        opened.read(0)
