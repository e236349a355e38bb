"""PASCAL VOC, in its folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree  # nosec B405

import numpy as np

from fastsiam.errors import DataError, NoSplitError

from .dataset import (
    DetectionSet,
    Picture,
    Root,
    check_size,
    fault_of,
    has_file,
    read_file,
    stamp_images,
)

CLASSES: tuple[str, ...] = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train",
    "tvmonitor",
)  # fmt: skip

OWN_CLASSES = "classes.txt"
"""Beside VOC2007 and VOC2012: the class names of other data in VOC's form, one a line."""

_TARS = {
    (2007, "trainval"): "VOCtrainval_06-Nov-2007.tar",
    (2007, "test"): "VOCtest_06-Nov-2007.tar",
    (2012, "trainval"): "VOCtrainval_11-May-2012.tar",
}
"""The file that each split is distributed in."""

_NAME = re.compile(r"[0-9]{1,9}(_[0-9]{1,9})?")
_LARGEST_TEXT = 2**24
_SIDES = ("xmin", "ymin", "xmax", "ymax")


def open_voc(folder: Path, splits: list[tuple[int, str]]) -> DetectionSet:
    """Open splits of VOC as one set.

    Args:
        folder: holds ``VOCdevkit``, or is ``VOCdevkit`` itself.
        splits: year and list of each, such as (2007, "trainval").

    Raises:
        NoSplitError: a split is not there; says what was looked for.
        DataError: annotations cannot be read, hold a bad box or an unknown class, or lack their
            image; names the file.
    """
    roots = [_root(folder, year, split) for year, split in splits]
    classes = [_classes(root) for root in roots]
    if classes[0] != classes[-1]:
        raise DataError(f"{roots[-1]} and {roots[0]} name different classes")
    places = {name: place for place, name in enumerate(classes[0])}
    entries: list[tuple[Picture, Root]] = []
    stamps = []
    for root, (year, split) in zip(roots, splits, strict=True):
        digest = hashlib.sha256()
        pictures = []
        for name in _names(root, _list_name(year, split)):
            file = f"VOC{year}/Annotations/{name}.xml"
            if not has_file(root, file):
                raise DataError(f"{root / file}: not there, but {split}.txt has {name}")
            text = read_file(root, file, _LARGEST_TEXT)
            digest.update(f"{name}\0".encode() + hashlib.sha256(text).digest())
            image = f"VOC{year}/JPEGImages/{name}.jpg"
            pictures.append(_Annotation(text, str(root / file), places).picture(image, name))
        images = stamp_images(root, (one.file for one in pictures), _list_name(year, split))
        entries += [(picture, root) for picture in pictures]
        stamps.append(f"{digest.hexdigest()}\0{images}")
    what = " and ".join(f"{split} {year}" for year, split in splits)
    return DetectionSet(f"VOC {what} in {folder}", classes[0], entries, stamps)


def _root(folder: Path, year: int, split: str) -> Path:
    """Find the VOCdevkit that holds a split."""
    wanted = _list_name(year, split)
    for root in (folder / "VOCdevkit", folder):
        if (root / wanted).is_file():
            return root
    tar = folder / _TARS[year, split]
    if tar.is_file():
        raise NoSplitError(f"{tar} is packed: unpack it first, by tar -C {folder} -xf {tar}")
    raise NoSplitError(
        f"{folder} holds no {split} split of VOC {year}: looked for VOCdevkit/{wanted}, which "
        f"{tar.name} holds"
    )


def _list_name(year: int, split: str) -> str:
    return f"VOC{year}/ImageSets/Main/{split}.txt"


def _classes(root: Path) -> tuple[str, ...]:
    """Return VOC's classes, or those that the data names itself."""
    if not has_file(root, OWN_CLASSES):
        return CLASSES
    text = read_file(root, OWN_CLASSES, _LARGEST_TEXT).decode("utf-8", "replace")
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not names or len(set(names)) < len(names):
        raise DataError(f"{root / OWN_CLASSES} must name each class once, one a line")
    return names


def _names(root: Path, list_name: str) -> Iterator[str]:
    """Yield the names of a split's images."""
    text = read_file(root, list_name, _LARGEST_TEXT).decode("utf-8", "replace")
    for line in filter(str.strip, text.splitlines()):
        name = line.split()[0]
        if not _NAME.fullmatch(name):
            raise DataError(
                f"{root / list_name} names the image {name[:40]!r}, "
                "but VOC's names are numbers such as 000005 or 2008_000008"
            )
        yield name


class _NoDoctype(ElementTree.TreeBuilder):
    """Builds a tree of XML without a document type, which may hold entities that grow."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise ElementTree.ParseError("it declares a document type, as VOC's files do not")


class _Annotation:
    """One annotation file.

    Args:
        text: its bytes.
        where: its place, for messages.
        classes: the position of each class.
    """

    def __init__(self, text: bytes, where: str, classes: dict[str, int]) -> None:
        self._where, self._classes = where, classes
        try:
            # Without a document type there are no entities, which is what bandit warns of.
            parser = ElementTree.XMLParser(target=_NoDoctype())  # nosec B314
            parser.feed(text)
            self._root: ElementTree.Element = parser.close()
        except (ElementTree.ParseError, ValueError, LookupError) as error:  # or its encoding
            raise DataError(f"{where} is no whole XML: {error}; fetch it again") from error

    def picture(self, file: str, name: str) -> Picture:
        """Return what it says of the image ``file``, which VOC calls ``name``."""
        height, width = check_size(
            self._where, self._root.findtext("size/height"), self._root.findtext("size/width")
        )
        objects = self._root.findall("object")
        found = [self._object(one, n, height, width) for n, one in enumerate(objects, 1)]
        boxes = np.array([box for box, _, _ in found], np.float32).reshape(-1, 4)
        sides = boxes[:, 2:] - boxes[:, :2]
        return Picture(
            file=file,
            height=height,
            width=width,
            boxes=boxes,
            labels=np.array([label for _, label, _ in found], np.int64),
            difficult=np.array([difficult for _, _, difficult in found], bool),
            crowd=np.zeros(len(found), bool),
            areas=sides[:, 0] * sides[:, 1],
            masks=None,
            image_id=int(name.replace("_", "")),
        )

    def _object(
        self, one: ElementTree.Element, number: int, height: int, width: int
    ) -> tuple[list[float], int, bool]:
        """Return an object's box, label and whether it is difficult.

        VOC counts pixels from 1 and its boxes include the last: xmin 1 and xmax WIDTH is the whole
        width. As points between pixels, counted from 0, that is from 0 to WIDTH: one is taken from
        the left and upper sides alone, as detectron2 does.
        """
        name = (one.findtext("name") or "").strip()
        which = f"{self._where}: object {number} ({name[:40]})"
        if name not in self._classes:
            raise DataError(
                f"{which} is of no known class; the classes are {', '.join(self._classes)}"
            )
        texts = [one.findtext(f"bndbox/{side}") for side in _SIDES]
        try:
            x0, y0, x1, y1 = (float(text or "") for text in texts)
            difficult = int(one.findtext("difficult") or 0) != 0
        except ValueError as error:
            raise DataError(f"{which} has no whole box or mark: {error}") from error
        box = [x0 - 1, y0 - 1, x1, y1]
        if fault := fault_of(box, height, width):
            said = ", ".join(f"{side} {text}" for side, text in zip(_SIDES, texts, strict=True))
            raise DataError(f"{which} has a box ({said}) that {fault}; repair or remove it")
        return box, self._classes[name], difficult
