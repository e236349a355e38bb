"""COCO, in its folders or in the zips that it is distributed as.

Objects whose box or mask has no area are left out, as detectron2 does: COCO's own training set has
two (annotations 918 and another, https://github.com/cocodataset/cocoapi/issues/355). How many were
is logged. Every other fault is an error.
"""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import parsed_json

from .dataset import (
    EMPTY,
    DetectionSet,
    Picture,
    Root,
    Segmentation,
    check_size,
    fault_of,
    has_file,
    open_zip,
    place_of,
    read_file,
    stamp_images,
)

log = logging.getLogger(__name__)

ANNOTATIONS_ZIP = "annotations_trainval2017.zip"
_LARGEST_JSON = 2**30


def open_coco(folder: Path, split: str) -> DetectionSet:
    """Open train2017 or val2017.

    Args:
        folder: holds ``annotations/`` and the folder of images, or their zips.
        split: "train2017" or "val2017".

    Raises:
        NoSplitError: the split is not there; says what was looked for.
        DataError: the annotations cannot be read, hold a bad box or mask or name a class or image
            that is not there; names the file and the annotation.
    """
    name = f"annotations/instances_{split}.json"
    root = _folder_or_zip(folder, (folder / name).is_file(), ANNOTATIONS_ZIP)
    if root is None or not has_file(root, name):
        raise NoSplitError(
            f"{folder} holds no annotations of {split}: looked for {name} and {ANNOTATIONS_ZIP}"
        )
    text, where = read_file(root, name, _LARGEST_JSON), place_of(root, name)
    images = _folder_or_zip(folder, (folder / split).is_dir(), f"{split}.zip")
    if images is None:
        raise NoSplitError(f"{folder} holds no images: looked for {split}/ and {split}.zip")
    digest = hashlib.sha256(text).hexdigest()
    table = _Table(text, where, split)
    del text
    pictures = table.pictures()
    stamp = stamp_images(images, (picture.file for picture in pictures), where)
    entries = [(picture, images) for picture in pictures]
    return DetectionSet(f"COCO {split} in {folder}", table.classes, entries, [f"{digest}\0{stamp}"])


def _folder_or_zip(folder: Path, unpacked: bool, name: str) -> Root | None:
    """Return a folder if it is unpacked, else the zip in it; None if neither is there."""
    if unpacked:
        return folder
    return open_zip(folder / name) if (folder / name).is_file() else None


class _Table:
    """What a file of annotations holds.

    Args:
        text: of the file.
        where: its place, for messages.
        folder: where the images lie, within the data set.
    """

    def __init__(self, text: bytes, where: str, folder: str) -> None:
        self._where, self._folder = where, folder
        try:
            table = parsed_json(text)
        except ValueError as error:
            raise DataError(f"{where} is no whole JSON: {error}; fetch it again") from error
        self._images = self._rows(table, "images")
        self._objects = self._rows(table, "annotations")
        self._labels, self.classes = self._categories(self._rows(table, "categories"))
        self._with_masks = any("segmentation" in one for one in self._objects)
        self._left_out: list[Any] = []

    def _rows(self, table: Any, key: str) -> list[dict[str, Any]]:
        rows = table.get(key) if isinstance(table, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{self._where} holds no list of {key}, as COCO's instances do")
        return rows

    def _categories(self, rows: list[dict[str, Any]]) -> tuple[dict[int, int], tuple[str, ...]]:
        """Number COCO's categories, whose ids have gaps, from 0 in the order of their ids."""
        try:
            named = {int(row["id"]): str(row["name"]) for row in rows}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{self._where}: a category has no id or name ({error})") from error
        if not named or len(named) < len(rows):
            raise DataError(f"{self._where}: categories are missing, or share an id")
        ids = sorted(named)
        return {key: label for label, key in enumerate(ids)}, tuple(named[key] for key in ids)

    def pictures(self) -> list[Picture]:
        """Return the pictures in the file's order, each with its objects in that order.

        Raises:
            DataError: an image or an annotation is not what it should be.
        """
        of_image: dict[int, list[dict[str, Any]]] = {}
        for row in self._images:
            key = row.get("id")
            if not isinstance(key, int) or key in of_image:
                raise DataError(
                    f"{self._where}: two images have the id {key!r}, or it is no number"
                )
            of_image[key] = []
        for one in self._objects:
            key = one.get("image_id")
            if not isinstance(key, int) or key not in of_image:
                raise self._bad(one, f"is of the image {key!r}, which is not there")
            of_image[key].append(one)
        found = [self._picture(row, of_image[row["id"]]) for row in self._images]
        if self._left_out:
            log.info(
                f"{self._where}: {len(self._left_out)} objects without an area are left out "
                f"(the first is annotation {self._left_out[0]})"
            )
        return found

    def _picture(self, row: dict[str, Any], rows: list[dict[str, Any]]) -> Picture:
        """Return one image's objects."""
        name = row.get("file_name")
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise DataError(f"{self._where}: image {row['id']} has the file name {name!r}")
        where = f"{self._where}: image {row['id']} ({name})"
        height, width = check_size(where, row.get("height"), row.get("width"))
        objects = [one for each in rows if (one := self._object(each, height, width))]
        return Picture(
            file=f"{self._folder}/{name}",
            height=height,
            width=width,
            boxes=np.array([one[0] for one in objects], np.float32).reshape(-1, 4),
            labels=np.array([one[1] for one in objects], np.int64),
            difficult=np.zeros(len(objects), bool),
            crowd=np.array([one[2] for one in objects], bool),
            areas=np.array([one[3] for one in objects], np.float32),
            masks=tuple(one[4] for one in objects) if self._with_masks else None,
            image_id=row["id"],
        )

    def _object(
        self, one: dict[str, Any], height: int, width: int
    ) -> tuple[list[float], int, bool, float, Any] | None:
        """Return an object's box, label, crowd, area and mask; None if it has no area."""
        try:
            label = self._labels[one["category_id"]]
        except (KeyError, TypeError) as error:
            raise self._bad(
                one, f"has the category {one.get('category_id')!r}, which is not there"
            ) from error
        try:
            x, y, w, h = map(float, one["bbox"])
            crowd = bool(int(one.get("iscrowd", 0)))
            area = float(one.get("area", w * h))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._bad(one, f"has no whole box, area or mark ({error})") from error
        box = [x, y, x + w, y + h]
        fault = fault_of(box, height, width)
        if fault and fault != EMPTY:
            raise self._bad(one, f"has a box ({x:g}, {y:g}, {w:g} x {h:g}) that {fault}")
        if not 0 <= area < math.inf:
            raise self._bad(one, f"has the area {area}")
        mask = self._mask(one, height, width) if self._with_masks else None
        if fault or (self._with_masks and not mask):
            self._left_out.append(one.get("id"))
            return None
        return box, label, crowd, area, mask

    def _mask(self, one: dict[str, Any], height: int, width: int) -> Segmentation:
        """Return an object's mask, an empty list if it has no area."""
        mask = one.get("segmentation")
        try:
            if isinstance(mask, dict):
                return _checked_runs(mask, height, width)
            if isinstance(mask, list):
                return _checked_polygons(mask, height, width)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise self._bad(one, f"has a broken mask: {error}") from error
        raise self._bad(one, "has no mask, but others have")

    def _bad(self, one: dict[str, Any], what: str) -> DataError:
        return DataError(f"{self._where}: annotation {one.get('id')!r} {what}; repair or remove it")


def _checked_polygons(polygons: list[Any], height: int, width: int) -> list[NDArray[np.float64]]:
    """Return polygons of three or more corners; ValueError if one leads far out of the image."""
    found = [np.array(polygon, np.float64) for polygon in polygons]
    for polygon in found:
        if polygon.ndim != 1 or polygon.size % 2:
            raise ValueError("a polygon is no list of x, y, x, y, ...")
        corners = polygon.reshape(-1, 2)
        sides = np.array([width, height])
        if not ((corners >= -sides) & (corners <= 2 * sides)).all():
            raise ValueError("a polygon is not finite, or lies outside its image")
    return [polygon for polygon in found if polygon.size >= 6]


def _checked_runs(mask: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Return run lengths as numbers that fill the image; ValueError if they do not.

    pycocotools reads and writes where runs lead it, without a check.
    """
    if list(mask["size"]) != [height, width]:
        raise ValueError(f"its size is {mask['size']}, its image's {[height, width]}")
    counts = mask["counts"]
    runs = unpacked_runs(counts) if isinstance(counts, str) else list(map(int, counts))
    if any(run < 0 for run in runs) or sum(runs) != height * width:
        raise ValueError("its run lengths do not fill the image")
    return {"size": [height, width], "counts": runs}


def unpacked_runs(text: str) -> list[int]:
    """Return the run lengths of COCO's compressed text.

    Numbers of six bits a letter, five of them of the number, the lowest first; the sixth says that
    more follow. From the third run on a number is the difference to the last but one.

    Raises:
        ValueError: the text ends within a number, or has other letters.
    """
    runs: list[int] = []
    number, bits = 0, 0
    for letter in text:
        six = ord(letter) - 48
        if not 0 <= six < 64 or bits > 40:
            raise ValueError("its run lengths have strange letters")
        number |= (six & 31) << bits
        bits += 5
        if six & 32:
            continue
        if six & 16:
            number -= 1 << bits
        runs.append(number + (runs[-2] if len(runs) > 2 else 0))
        number, bits = 0, 0
    if bits:
        raise ValueError("its run lengths end in a number's midst")
    return runs
