"""Readers for the folders of PASCAL VOC and COCO, unpacked or in zips."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree  # nosec B405

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.errors import BackendError, DataError, NoSplitError
from fastsiam.files import os_errors_as, why
from fastsiam.pipelines.store.decode import decode

Task = Literal["voc07", "voc0712", "coco"]
"""Task, with its training and test sets.

``voc07`` is trainval2007 -> test2007, ``voc0712`` trainval2007 and trainval2012 -> test2007,
``coco`` train2017 -> val2017.
"""

VOC_CLASSES: tuple[str, ...] = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip

Entry = Path | zipfile.Path
"""A file or folder, possibly in a zip. Threads may read a zip at once; forks may not."""

_LARGEST_MEMBER = 2**30
"""Largest file in a zip that is read, in bytes; COCO's annotations have 0.45 GB."""


@dataclass(frozen=True)
class Picture:
    """An image and its n objects, in the order of the annotations, without COCO's crowds."""

    file: Entry
    height: int
    width: int
    """Pixels, according to the annotations."""
    boxes: NDArray[np.float32]
    """(n, 4) x0, y0, x1, y1 in pixels; the image is from (0, 0) to (width, height)."""
    labels: NDArray[np.int64]
    """(n,) indices into the data set's classes."""
    difficult: NDArray[np.bool_]
    """(n,) VOC's difficult objects, which count neither as found nor as missed."""
    annotations: tuple[dict[str, Any], ...] = ()
    """(n,) COCO's annotations, from which pycocotools makes masks; empty for VOC."""


@dataclass(frozen=True)
class DetectionSet:
    """A split of a data set."""

    name: str
    classes: tuple[str, ...]
    pictures: list[Picture]
    coco: Any = None
    """The annotations as a ``pycocotools.coco.COCO``; None for VOC."""
    checksum: int = 0
    """CRC-32 of the classes and of the files with the annotations."""

    def check_has_objects(self) -> None:
        """Raise ``DataError`` if there are no objects, or only difficult ones."""
        if all(one.difficult.all() for one in self.pictures):
            raise DataError(f"{self.name} has no objects to detect")

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB.

        Raises:
            DataError: the image cannot be read or decoded, or its size differs from its annotation.
        """
        picture = self.pictures[index]
        content = _read(picture.file)
        try:
            image = decode(content)
        except ValueError as error:
            raise DataError(f"{picture.file} cannot be decoded ({error})") from error
        if image.size != (picture.width, picture.height):
            raise DataError(
                f"{picture.file} is {image.width} x {image.height} pixels, but its annotation "
                f"says {picture.width} x {picture.height}"
            )
        return image


def open_detection(task: Task, data: Path, split: Literal["train", "val"]) -> DetectionSet:
    """Read all annotations of a split.

    Args:
        task: the task that the split belongs to.
        data: the folder with ``VOCdevkit`` (or ``VOCdevkit`` itself), or with COCO's
            ``annotations``; or with their zips.
        split: "train", or "val", which is VOC's test2007 or COCO's val2017.

    Raises:
        NoSplitError: the split does not exist; the message has the expected path.
        DataError: an annotation or a zip cannot be read, or an image is missing; the message has
            its path.
        BackendError: the task is COCO and pycocotools is not installed.
    """
    if not data.is_dir():
        raise DataError(f"no data at {data}: pass the folder with {task}'s data")
    with os_errors_as(DataError, f"cannot open the data at {data}"):
        dataset = (
            _open_coco(data, f"{split}2017") if task == "coco" else _open_voc(task, data, split)
        )
        missing = [one.file for one in dataset.pictures if not one.file.is_file()]
    if not dataset.pictures:
        raise DataError(f"{dataset.name} has no images")
    if missing:
        raise DataError(
            f"{missing[0]} is missing ({len(missing):,} of {len(dataset.pictures):,} images are)"
        )
    return dataset


def _find(data: Path, name: str, archive: str) -> Entry:
    """Return a file or folder in ``data``, or in a zip there if only the zip exists."""
    entry, zip_path = data / name, data / archive
    if entry.exists() or not zip_path.is_file():
        return entry
    with _read_errors(zip_path):
        return zipfile.Path(zip_path) / name


def _read(file: Entry) -> bytes:
    """Read a file; ``zipfile`` compares the checksums of files in zips."""
    with _read_errors(file):
        if isinstance(file, zipfile.Path) and file.is_file():
            member = file.root.getinfo(file.at)
            # Reading a corrupt file that is large or compressed otherwise can need gigabytes.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("it is compressed by another method than deflate")
            if (size := max(member.file_size, member.compress_size)) > _LARGEST_MEMBER:
                raise ValueError(f"{size:,} bytes are too many")
        return file.read_bytes()


@contextlib.contextmanager
def _read_errors(file: Entry) -> Iterator[None]:
    """Convert the errors of a file, which may be a zip or in a zip, to ``DataError``."""
    try:
        with os_errors_as(DataError, f"cannot read {file}"):
            yield
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"cannot read {file}: {why(error)}; download the zip again") from error


def _open_voc(task: str, data: Path, split: str) -> DetectionSet:
    root = _find(data, "VOCdevkit", "VOCdevkit.zip")
    root = root if root.is_dir() else data
    part = "trainval" if split == "train" else "test"
    years = [2007, 2012] if (task, split) == ("voc0712", "train") else [2007]
    classes, own_classes = VOC_CLASSES, root / "classes.txt"
    if own_classes.is_file():  # names of the classes of other data, one per line
        lines = _text(own_classes).split("\n")
        classes = tuple(filter(None, map(str.strip, lines)))
    pictures: list[Picture] = []
    checksum = zlib.crc32(repr(classes).encode())
    for year in years:
        folder = root / f"VOC{year}"
        names = folder / f"ImageSets/Main/{part}.txt"
        if not names.is_file():
            raise NoSplitError(
                f"{data} has no {part} split of VOC {year}: looked for {names}; unpack VOC's "
                "tars with `tar xf` first"
            )
        for line in filter(str.strip, _text(names).splitlines()):
            name = line.split()[0]
            path = folder / f"Annotations/{name}.xml"
            annotation, image = _read(path), folder / f"JPEGImages/{name}.jpg"
            checksum = zlib.crc32(name.encode() + annotation, checksum)
            try:
                pictures.append(_voc_picture(image, annotation, classes))
            except (ElementTree.ParseError, ArithmeticError, ValueError, LookupError) as error:
                raise DataError(f"cannot read {path}: {why(error)}") from error
    splits_text = " and ".join(f"{part} {year}" for year in years)
    return DetectionSet(f"VOC {splits_text} in {data}", classes, pictures, checksum=checksum)


def _text(file: Entry) -> str:
    return _read(file).decode("utf-8-sig", errors="replace")


def _voc_picture(image: Entry, annotation: bytes, classes: tuple[str, ...]) -> Picture:
    """Parse the annotation of one image.

    VOC's pixels are 1-based and its boxes include the last one: xmin 1 and xmax WIDTH is the full
    width. In coordinates between pixels, that is 0 to WIDTH. So 1 is subtracted from the left and
    upper sides only, as in detectron2.
    """
    root = ElementTree.fromstring(annotation)  # nosec B314
    height, width = (int(_number(root, f"size/{side}")) for side in ("height", "width"))
    boxes, labels, difficult = [], [], []
    for element in root.findall("object"):
        if (class_name := element.findtext("name", "").strip()) not in classes:
            raise ValueError(f"{class_name!r} is not one of the classes {', '.join(classes)}")
        labels.append(classes.index(class_name))
        sides = ("xmin", "ymin", "xmax", "ymax")
        x0, y0, x1, y1 = (_number(element, f"bndbox/{side}") for side in sides)
        boxes.append(_check_box((x0 - 1, y0 - 1, x1, y1), height, width))
        difficult.append(int(element.findtext("difficult") or 0) != 0)
    return Picture(
        file=image,
        height=height,
        width=width,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        difficult=np.array(difficult, bool),
    )


def _number(element: ElementTree.Element, path: str) -> float:
    if not (text := element.findtext(path, "").strip()):
        raise ValueError(f"{path} is missing")
    return float(text)


def _open_coco(data: Path, split: str) -> DetectionSet:
    name, archive = f"annotations/instances_{split}.json", "annotations_trainval2017.zip"
    path, folder = _find(data, name, archive), _find(data, split, f"{split}.zip")
    for entry, zip_name in ((path, archive), (folder, f"{split}.zip")):
        if not entry.exists():
            raise NoSplitError(f"{data} has no {split}: looked for {entry} and {zip_name}")
    try:
        from pycocotools.coco import COCO
    except ImportError as error:
        raise BackendError(
            f"COCO needs pycocotools ({error}): pip install 'fastsiam[detection]'"
        ) from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            coco, content = COCO(), _read(path)
            coco.dataset = {"info": {}, **json.loads(content)}  # some pycocotools need "info"
            coco.createIndex()
        _check_ids(coco)
        # COCO's category ids have gaps.
        labels = {category: label for label, category in enumerate(sorted(coco.cats))}
        pictures = [
            _coco_picture(folder, image, coco.imgToAnns[image["id"]], labels)
            for image in coco.imgs.values()
        ]
        classes = tuple(coco.cats[category]["name"] for category in labels)
    except (ValueError, LookupError, TypeError, AssertionError, RecursionError) as error:
        raise DataError(f"cannot read {path} as COCO's annotations: {_message(error)}") from error
    # COCOeval reads id 0 as "not found" and needs numeric ids; the file may also have duplicates.
    coco.anns = dict(enumerate(coco.dataset.get("annotations", []), start=1))
    for number, row in coco.anns.items():
        row["id"] = number
    name = f"COCO {split} in {data}"
    return DetectionSet(name, classes, pictures, coco, zlib.crc32(content))


def _check_ids(coco: Any) -> None:
    """Raise ``ValueError`` if an id is not unique, or an annotation's image or class is unknown."""
    for what, index in (("images", coco.imgs), ("categories", coco.cats)):
        if len(index) < len(rows := coco.dataset.get(what, [])):
            (number, count), *_ = Counter(row["id"] for row in rows).most_common(1)
            raise ValueError(f"{count} {what} have the id {number!r}")
    for row in coco.dataset.get("annotations", []):
        for what, index in (("image", coco.imgs), ("category", coco.cats)):
            if (number := row[f"{what}_id"]) not in index:
                raise ValueError(f"annotation {row.get('id')}: no {what} has the id {number!r}")


def _coco_picture(
    folder: Entry, image: dict[str, Any], rows: list[dict[str, Any]], labels: dict[int, int]
) -> Picture:
    """Return an image with its objects to train on; complete all annotations for COCOeval."""
    height, width = image["height"], image["width"]
    boxes, class_labels, objects = [], [], []
    for row in rows:
        try:
            if box := _training_box(row, height, width):
                boxes.append(box)
                class_labels.append(labels[row["category_id"]])
                objects.append(row)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"annotation {row.get('id')}: {_message(error)}") from error
    return Picture(
        file=folder / image["file_name"],
        height=height,
        width=width,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        labels=np.array(class_labels, np.int64),
        difficult=np.zeros(len(objects), bool),
        annotations=tuple(objects),
    )


def _training_box(row: dict[str, Any], height: int, width: int) -> tuple[float, ...] | None:
    """Complete an annotation for COCOeval; return its box as corners, or None if it is not used.

    Training leaves out crowds and, as in detectron2, empty boxes and objects without a mask.
    """
    x, y, w, h = map(float, row["bbox"])
    row["iscrowd"] = int(row.get("iscrowd") or 0)
    row["area"] = float(row.get("area", w * h))
    mask = row["segmentation"]
    _check_segmentation(mask, height, width)
    if isinstance(mask, list):
        # pycocotools fails at a polygon of two corners, and if there is no polygon.
        polygons = [polygon for polygon in mask if len(polygon) >= 6]
        empty_mask = {"size": [height, width], "counts": [height * width]}
        row["segmentation"] = polygons or empty_mask
        if not polygons:
            return None
    if not min(w, h) >= 0:
        raise ValueError(f"the box is {w} x {h} pixels")
    if row["iscrowd"] or min(w, h) == 0:
        return None
    return _check_box((x, y, x + w, y + h), height, width)


def _message(error: Exception) -> str:
    """Return the message of a ``ValueError``, or of a missing field; else also the type."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) if type(error) is ValueError else repr(error)


def _check_segmentation(mask: Any, height: int, width: int) -> None:
    """Check that polygons and run lengths fit their image.

    pycocotools does not check them: it would read out of bounds or never return.

    Raises:
        ValueError, LookupError, TypeError: they do not fit, or have a wrong type or field.
    """
    if isinstance(mask, list):
        limit = 2 * max(height, width)  # some outlines extend slightly beyond their image
        for polygon in mask:
            is_near = all(-limit <= value <= limit for value in polygon)
            if not is_near or len(polygon) % 2 or len(polygon) < 4:
                raise ValueError("a polygon is not a list x, y, x, y, ... within the image")
        return
    if not isinstance(mask, dict):
        raise ValueError(f"segmentation is {mask!r}, neither polygons nor run lengths")
    counts = mask["counts"]
    if isinstance(counts, str):
        counts = _run_lengths(counts)
    if mask["size"] != [height, width]:
        raise ValueError(f"a mask has the size {mask['size']}, its image {[height, width]}")
    if min(counts, default=0) < 0 or sum(counts) != height * width:
        raise ValueError(f"run lengths cover {sum(counts)} pixels, not {height} x {width}")


def _run_lengths(text: str) -> list[int]:
    """Decode COCO's compressed run lengths.

    Each character has five bits of a number and a continuation bit. From the fourth length on, the
    number is the difference to the length two before.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"{character!r} is not a valid character in run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if bits < 32:
            value -= (bits >> 4) << shift  # the sign
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError("run lengths are truncated")
    return counts


def _check_box(box: tuple[float, ...], height: int, width: int) -> tuple[float, ...]:
    """Return a box (x0, y0, x1, y1); raise ``ValueError`` if it is empty or outside its image."""
    x0, y0, x1, y1 = box
    is_near = x0 < width and y0 < height and x1 > 0 and y1 > 0
    if not (all(map(isfinite, box)) and x0 < x1 and y0 < y1 and is_near):
        raise ValueError(f"the box {list(box)} is empty or outside its image of {width} x {height}")
    return box
