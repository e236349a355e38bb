"""Annotations and zips of detection sets, for the fuzzers of their readers."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastsiam.evaluate.detection import Task, open_detection
from fastsiam.evaluate.detection.masks import pixels
from tests.evaluate.detection.made import make_detection_set

VOC = "VOCdevkit/VOC2007/Annotations/000002.xml"
COCO = "annotations/instances_val2017.json"
_PACKED = {"size": [4, 4], "counts": "52203"}
"""Runs of 5, 2, 7 (2 and 5 more) and 2 pixels, as COCO packs them."""


@cache
def _made(folder: Path) -> Path:
    make_detection_set(folder / "set", train=2, val=1)
    return folder / "set"


def voc_annotations(folder: Path) -> list[bytes]:
    """Return annotation files."""
    return [path.read_bytes() for path in sorted((_made(folder) / "voc").rglob("*.xml"))]


def beside_voc(folder: Path) -> dict[str, bytes]:
    """Return what ``VOC`` belongs to: a test split of this one image."""
    image = (_made(folder) / "voc/VOCdevkit/VOC2007/JPEGImages/000002.jpg").read_bytes()
    root = "VOCdevkit/VOC2007"
    return {
        f"{root}/ImageSets/Main/test.txt": b"000002\n",
        f"{root}/JPEGImages/000002.jpg": image,
        "VOCdevkit/classes.txt": b"stripes\ndots\nrings\nbricks\n",
    }


def coco_annotations(folder: Path) -> list[bytes]:
    """Return annotations with polygons, plain run lengths and packed ones."""
    whole = json.loads((_made(folder) / "coco" / COCO).read_text())
    one = whole["images"][0] | {"height": 4, "width": 4}
    thing = whole["annotations"][0] | {"bbox": [1, 1, 2, 3], "area": 4}
    masks = [[[0, 0, 4, 0, 4, 4.5]], {"size": [4, 4], "counts": [5, 2, 7, 2]}, _PACKED]
    small = [thing | {"id": i, "iscrowd": i, "segmentation": mask} for i, mask in enumerate(masks)]
    few = {"images": [one], "annotations": small, "categories": whole["categories"]}
    return [json.dumps(few).encode(), json.dumps(whole).encode()]


def beside_coco(folder: Path) -> dict[str, bytes]:
    """Return the image that the annotations are of."""
    name = "val2017/000000000002.jpg"
    return {name: (_made(folder) / "coco" / name).read_bytes()}


def read_voc(folder: Path) -> None:
    """Read a test split of VOC."""
    _read("voc07", folder)


def read_coco(folder: Path) -> None:
    """Read a validation split of COCO."""
    _read("coco", folder)


def _read(task: Task, folder: Path) -> None:
    """Read everything of a split, masks up to their pixels where pycocotools is there."""
    opened = open_detection(task, folder, "val")
    for index, one in enumerate(opened.pictures()):
        opened.read(index)
        for mask in one.masks or ():
            if one.height * one.width < 1 << 20 and find_spec("pycocotools"):
                pixels(mask, one.height, one.width)
