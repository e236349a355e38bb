"""Detection sets: VOC and COCO folders, the generated set in both formats, and bad input."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import BackendError, DataError, NoSplitError
from fastsiam.evaluate.detection import Detections, Task, coco_scores, open_detection, voc_scores
from fastsiam.evaluate.detection.datasets import VOC_CLASSES
from tests.conftest import import_or_skip
from tests.evaluate.detection.generated_set import CLASSES, run_lengths, voc_annotation

NAMES = "VOCdevkit/VOC2007/ImageSets/Main/test.txt"
ANNOTATION = "VOCdevkit/VOC2007/Annotations/2008_000012.xml"
IMAGE = "VOCdevkit/VOC2007/JPEGImages/2008_000012.jpg"


def voc(folder: Path, *objects: tuple[Any, ...], size: Any = (60, 40)) -> Path:
    """Write a test split of one image; objects are (class, difficult, xmin, ymin, xmax, ymax)."""
    root = folder / "VOCdevkit/VOC2007"
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / name).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (60, 40)).save(root / "JPEGImages/2008_000012.jpg")
    part = "<part><name>head</name></part>"
    text = voc_annotation(size, *objects).replace("</object>", f"{part}</object>")
    (folder / ANNOTATION).write_text(text)
    (folder / NAMES).write_text("2008_000012 1\n")
    return folder


def annotation(number: int, image: Any = 9, category: int = 3, **more: Any) -> dict[str, Any]:
    polygon = [10.0, 5.0, 30.0, 5.0, 30.0, 25.0, 10.0, 25.0]
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": [10.0, 5.0, 20.0, 20.0],
        "area": 400.0, "iscrowd": 0, "segmentation": [polygon],
    } | more  # fmt: skip


def coco_set(folder: Path, *objects: dict[str, Any]) -> Path:
    """Write a validation split of two images, with ids 7 and 9."""
    import_or_skip("pycocotools", "detection")
    for part in ("val2017", "annotations"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for key in (7, 9):
        Image.new("RGB", (60, 40)).save(folder / f"val2017/{key:012d}.jpg")
    images = [
        {"id": key, "file_name": f"{key:012d}.jpg", "height": 40, "width": 60} for key in (7, 9)
    ]
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car"}]
    table = {"images": images, "annotations": list(objects), "categories": categories}
    (folder / "annotations/instances_val2017.json").write_text(json.dumps(table))
    return folder


def test_voc_boxes_are_shifted_to_count_from_zero(tmp_path: Path) -> None:
    """A box around the entire image is (1, 1, w, h) in VOC and (0, 0, w, h) here."""
    voc(tmp_path, ("dog", 0, 1, 1, 60, 40), ("cat", 1, 5, 6, 5, 6), ("cow", 0, 0, 2.5, 61, 40.0))
    opened = open_detection("voc07", tmp_path, "val")
    assert opened.classes == VOC_CLASSES and len(VOC_CLASSES) == 20
    (one,) = opened.pictures
    assert one.boxes.tolist() == [[0, 0, 60, 40], [4, 5, 5, 6], [-1, 1.5, 61, 40]]
    assert [VOC_CLASSES[label] for label in one.labels] == ["dog", "cat", "cow"]
    assert one.difficult.tolist() == [False, True, False] and one.boxes.dtype == np.float32
    assert (one.file.name, one.height, one.width) == ("2008_000012.jpg", 40, 60)
    assert opened.image(0).size == (60, 40)
    (empty,) = open_detection("voc07", voc(tmp_path), "val").pictures
    assert empty.boxes.shape == (0, 4)
    (tmp_path / "VOCdevkit/classes.txt").write_text("lion\nzebra\n")
    zebras = [open_detection("voc07", voc(tmp_path, ("zebra", d, 1, 1, 9, 9)), "val") for d in "01"]
    assert zebras[0].pictures[0].labels.tolist() == [1]
    assert zebras[0].checksum != zebras[1].checksum  # one is difficult
    (tmp_path / "VOCdevkit/classes.txt").write_text("\ufefflion\nzebra\n", encoding="utf-8")
    assert open_detection("voc07", tmp_path, "val").classes == ("lion", "zebra")
    for file, name in ((ANNOTATION, "zebra_a.xml"), (IMAGE, "zebra_a.jpg")):
        shutil.copy(tmp_path / file, (tmp_path / file).with_name(name))
    (tmp_path / NAMES).write_text("2008_000012\nzebra_a\n2008_000012\n")
    pictures = open_detection("voc07", tmp_path, "val").pictures
    assert [x.file.stem for x in pictures] == ["2008_000012", "zebra_a", "2008_000012"]


def test_coco_boxes_become_corners_and_labels_contiguous(tmp_path: Path) -> None:
    """Crowds and objects with zero area, such as COCO's annotation 918, are left out."""
    runs = {"size": [40, 60], "counts": [100, 300, 2000]}
    objects = [
        annotation(1, category=90), annotation(2, iscrowd=1, segmentation=runs), annotation(3),
        annotation(918, bbox=[29.65, 38.33, 1.03, 0.0]), annotation(4, segmentation=[[1, 2, 3, 4]]),
    ]  # fmt: skip
    opened = open_detection("coco", coco_set(tmp_path, *objects), "val")
    assert opened.classes == ("car", "toothbrush")
    first, second = opened.pictures
    assert (first.file.stem, first.boxes.shape) == ("000000000007", (0, 4))
    assert second.file == tmp_path / "val2017/000000000009.jpg"
    assert second.boxes.tolist() == [[10, 5, 30, 25]] * 2 and second.labels.tolist() == [1, 0]
    covered = np.zeros((40, 60), np.uint8)
    covered[5:25, 10:30] = 1
    np.testing.assert_array_equal(opened.coco.annToMask(second.annotations[1]), covered)
    other_masks = coco_set(tmp_path, *objects[:-1], annotation(4, segmentation=[[1, 2, 3, 5]]))
    assert open_detection("coco", other_masks, "val").checksum != opened.checksum


@pytest.mark.parametrize("task", ["voc07", "coco"])
def test_ap_counts_thresholds_below_iou(task: Task, detection_data: Path) -> None:
    """Detect a share of each object's width; AP counts the IoU thresholds below that share."""
    import_or_skip("pycocotools", "detection")
    assert len(open_detection("voc07", detection_data / "voc/VOCdevkit", "train").pictures) == 6
    assert len(open_detection("voc0712", detection_data / "voc", "train").pictures) == 12
    truth = open_detection(task, detection_data / task[:4].rstrip("0"), "val")
    assert truth.classes == CLASSES
    for share, ap in ((1.0, 100), (0.82, 70), (0.62, 30)):
        detections = []
        for one in truth.pictures:
            boxes, scores = one.boxes.copy(), np.ones(len(one.labels), "f4")
            boxes[:, 2] = boxes[:, 0] + share * (boxes[:, 2] - boxes[:, 0])
            masks = tuple(map(truth.coco.annToRLE, one.annotations)) if truth.coco else ()
            detections.append(Detections(boxes, scores, one.labels, masks))
        expected = pytest.approx({"AP50": 100, "AP": ap, "AP75": 100 * (share > 0.75)})
        if task == "coco":
            nothing = [Detections(x.boxes[:0], x.scores[:0], x.labels[:0]) for x in detections]
            assert coco_scores(truth, detections) == expected
            assert coco_scores(truth, nothing)["AP50"] == 0
            assert coco_scores(truth, detections, "segm")["AP"] == pytest.approx(100)
        else:
            assert voc_scores(truth, detections) == expected


BAD_VOC: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty box": (lambda p: voc(p, ("dog", 0, 5, 5, 4, 9)), "2008_000012.xml: the box .* empty"),
    "outside": (lambda p: voc(p, ("dog", 0, 70, 1, 90, 9)), "outside its image of 60 x 40"),
    "no number": (lambda p: voc(p, ("dog", 0, "x", 1, 5, 9)), "2008_000012.xml: .*'x'"),
    "class": (lambda p: voc(p, ("dragon", 0, 1, 1, 5, 9)), "'dragon' is not one of the classes"),
    "infinite": (lambda p: voc(p, ("dog", 0, 1, 1, "inf", 9)), "empty or outside its image"),
    "no size": (lambda p: voc(p, size=("", "")), "2008_000012.xml: size/height is missing"),
    "infinite size": (lambda p: voc(p, size=("inf", 40)), "2008_000012.xml: cannot convert"),
    "no side": (lambda p: voc(p, ("dog", 0, 1, "", 5, 9)), "2008_000012.xml: bndbox/ymin is miss"),
    "another size": (lambda p: voc(p, size=(61, 40)), "60 x 40 pixels, but its annotation says 61"),
    "no XML": (lambda p: (p / ANNOTATION).write_text("<a>"), "2008_000012.xml: no element found"),
    "missing image": (lambda p: (p / IMAGE).unlink(), r"2008_000012.jpg is missing \(1 of 1 image"),
    "missing annotation": (lambda p: (p / ANNOTATION).unlink(), "2008_000012.xml"),
    "damaged image": (lambda p: (p / IMAGE).write_bytes(b"x"), "000012.jpg cannot be decoded"),
    "no list": (lambda p: (p / NAMES).unlink(), "looked for .*test.txt; unpack VOC's tars"),
    "empty list": (lambda p: (p / NAMES).write_text("\n"), "has no images"),
}


def zip_up(folder: Path) -> Path:
    """Move a VOC folder of one image into a zip."""
    path = folder / "VOCdevkit.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for one in sorted((folder / "VOCdevkit").rglob("*.*")):
            file.write(one, one.relative_to(folder))
    shutil.rmtree(folder / "VOCdevkit")
    return path


def change_field(path: Path, name: str, offset: int, value: bytes) -> None:
    """Change a field of a file in a zip's central directory."""
    content = bytearray(path.read_bytes())
    start = content.rindex(name.encode()) - 46 + offset
    content[start : start + len(value)] = value
    path.write_bytes(content)


BAD_ZIPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "zip: cut": (lambda p: p.write_bytes(p.read_bytes()[:-30]), "VOCdevkit.zip: File is not a zip"),
    "zip: text": (lambda p: p.write_bytes(b"x" * 100), "VOCdevkit.zip: File is not a zip file"),
    "zip: checksum": (lambda p: change_field(p, IMAGE, 16, b"x"), "000012.jpg: Bad CRC-32"),
    "zip: encrypted": (lambda p: change_field(p, IMAGE, 8, b"\1"), "000012.jpg: .* is encrypted"),
    "zip: large": (lambda p: change_field(p, IMAGE, 24, b"\xff\xff\xff\x7f"), "2,147,483,647 byt"),
    "zip: damaged list": (lambda p: change_field(p, NAMES, 16, b"x"), "test.txt: Bad CRC-32"),
    "zip: bzip2": (lambda p: change_field(p, NAMES, 10, b"\x0c"), "it is compressed by another"),
    "zip: missing image": (lambda p: change_field(p, IMAGE, 46, b"X"), "000012.jpg is missing"),
    "zip: no annotation": (lambda p: change_field(p, ANNOTATION, 46, b"X"), "cannot read .*12.xml"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD_VOC, *BAD_ZIPS])
def test_corrupt_voc_file_is_named_in_one_line(case: str, tmp_path: Path) -> None:
    """In a folder, and in a zip."""
    break_it, message = (BAD_VOC | BAD_ZIPS)[case]
    path = voc(tmp_path, ("dog", 0, 1, 1, 9, 9))
    if case in BAD_ZIPS:
        path = zip_up(path)
    assert open_detection("voc07", tmp_path, "val").image(0).size == (60, 40)
    break_it(path)
    with pytest.raises(DataError, match=message) as caught:
        open_detection("voc07", tmp_path, "val").image(0)
    assert "\n" not in str(caught.value)


BAD_MASKS: dict[str, Any] = {
    "no mask": None,
    "a word": "mask",
    "no counts": {"size": [40, 60]},
    "another size": {"size": [60, 40], "counts": [2400]},
    "too many pixels": {"size": [40, 60], "counts": [100, 5_000_000]},
    "negative": {"size": [40, 60], "counts": [100, -50, 2350]},
    "words": {"size": [40, 60], "counts": ["a", "b"]},
    "other characters": {"size": [40, 60], "counts": "l1~\n"},
    "compressed, too many pixels": {"size": [40, 60], "counts": "oooo1"},
    "compressed, cut off": {"size": [40, 60], "counts": "``"},
    "far away": [[0, 0, 1e8, 0, 1e8, 1e8]],
    "not a number": [[0, 0, float("nan"), 5, 6, 7]],
    "half a corner": [[1, 2, 3, 4, 5, 6, 7]],
    "words as corners": [["a", 2, 3, 4, 5, 6]],
    "no polygon": [1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("crowd", [0, 1])
def test_invalid_masks_are_rejected_before_pycocotools(crowd: int, tmp_path: Path) -> None:
    """pycocotools does not check masks: most of these would be filled from arbitrary memory."""
    message = r"^[^\n]*instances_val2017\.json .*annotation 918: [^\n]*$"
    for mask in BAD_MASKS.values():
        data = coco_set(tmp_path, annotation(1), annotation(918, segmentation=mask, iscrowd=crowd))
        with pytest.raises(DataError, match=message):
            open_detection("coco", data, "val")


def test_masks_equal_pycocotools(tmp_path: Path) -> None:
    """Plain and compressed run lengths; an object without a mask counts as missed."""
    tools = import_or_skip("pycocotools.mask", "detection")
    covered = np.asfortranarray(np.random.default_rng(0).random((40, 60)) < 0.3, np.uint8)
    covered[5:25, 10:30] = 1
    code = tools.encode(covered)
    compressed = code | {"counts": code["counts"].decode()}
    masks = [compressed, run_lengths(covered > 0), [], [[1, 2, 3, 4]]]
    objects = [annotation(i, segmentation=mask) for i, mask in enumerate(masks, start=1)]
    opened = open_detection("coco", coco_set(tmp_path, *objects), "val")
    empty, one = opened.pictures
    assert len(one.labels) == 2
    for row in one.annotations:
        np.testing.assert_array_equal(opened.coco.annToMask(row), covered)
    detections = Detections(one.boxes, np.ones(2, "f4"), one.labels, (code, code))
    nothing = Detections(empty.boxes, np.zeros(0, "f4"), empty.labels)
    assert 0 < coco_scores(opened, [nothing, detections], "segm")["AP"] < 100


def test_fields_required_by_pycocotools_are_filled_in(tmp_path: Path) -> None:
    """Fields that pycocotools needs are filled in: a positive id, the area and iscrowd."""
    odd: list[tuple[Any, Any]] = [(0, 1), (1, 1), ("a7", "b")]
    for ids in odd:
        objects = [
            annotation(key, bbox=[x, 5, 10, 20]) for key, x in zip(ids, (10, 40), strict=True)
        ]
        for one in objects:
            del one["area"], one["iscrowd"]
        objects[0]["iscrowd"] = None
        opened = open_detection("coco", coco_set(tmp_path, *objects), "val")
        detections = [
            Detections(one.boxes, np.ones(len(one.labels), "f4"), one.labels)
            for one in opened.pictures
        ]
        assert coco_scores(opened, detections)["AP"] == pytest.approx(100)


def test_corrupt_coco_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = coco_set(tmp_path, annotation(1)) / "annotations/instances_val2017.json"
    original = path.read_text()
    table = json.loads(original)
    without_mask = annotation(1)
    del without_mask["segmentation"]
    bad_annotations = (
        (annotation(1, bbox=[61, 5, 3, 4]), "outside its image"),
        (annotation(1, category=4), "no category has the id 4"),
        (annotation(1, category=4, iscrowd=1), "no category has the id 4"),
        (annotation(1, image="9"), "no image has the id '9'"),
        (annotation(1, bbox=[1, 5, 3]), "expected 4, got 3"),
        (annotation(1, bbox=[1, 5, -3, 4]), "the box is -3.0 x 4.0 pixels"),
        (annotation(1, bbox=[1, 5, float("nan"), 4]), "the box is nan x 4.0 pixels"),
        (without_mask, "'segmentation' is missing"),
    )
    bad_tables = (
        *(({"annotations": [one]}, f"annotation 1: .*{text}") for one, text in bad_annotations),
        ({"images": table["images"] + table["images"][:1]}, "2 images have the id 7"),
        ({"categories": table["categories"] + table["categories"][:1]}, "2 .* the id 90"),
    )
    for content, message in (
        ("{", ""),
        ("[]", ""),
        (original.replace('"height": 40, ', ""), ""),
        *((json.dumps(table | part), message) for part, message in bad_tables),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=rf"cannot read .*instances_val2017\.json .*{message}"):
            open_detection("coco", tmp_path, "val")
    with pytest.raises(NoSplitError, match=r"looked for .*train2017\.json and annotations_t"):
        open_detection("coco", tmp_path, "train")
    with pytest.raises(DataError, match="no data at"):
        open_detection("coco", tmp_path / "nowhere", "train")
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(BackendError, match=r"fastsiam\[detection\]"):
        open_detection("coco", tmp_path, "val")
