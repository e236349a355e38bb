"""Annotated pictures: boxes, classes and masks of the objects in an image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .archives import Files

Task = Literal["voc07", "voc0712", "coco"]
"""What is trained and tested on.

``voc07`` is trainval2007 -> test2007, ``voc0712`` trainval2007 and trainval2012 -> test2007,
``coco`` train2017 -> val2017.
"""

Segmentation = list[NDArray[np.float64]] | dict[str, Any]
"""An object's mask as COCO writes it: polygons, each x, y, x, y, ... in pixels; or run lengths,
{"size": [height, width], "counts": numbers or a text}. ``masks`` has what becomes of it."""


@dataclass(frozen=True)
class Picture:
    """One image's objects; n of them, in the order of the annotations."""

    file: str
    """Name of the image within the data set, such as ``VOC2007/JPEGImages/000005.jpg``."""
    height: int
    width: int
    """Pixels, as the annotations have them."""
    boxes: NDArray[np.float32]
    """(n, 4) x0, y0, x1, y1 in pixels: the image reaches from (0, 0), its left upper corner, to
    (width, height). Some of COCO's reach a little over its edge."""
    labels: NDArray[np.int64]
    """(n,) positions among the data set's classes."""
    difficult: NDArray[np.bool_]
    """(n,) VOC's objects that count neither as found nor as missed."""
    crowd: NDArray[np.bool_]
    """(n,) COCO's regions of many objects, in which whatever is found counts as nothing."""
    areas: NDArray[np.float32]
    """(n,) square pixels: of the mask if there are masks, else of the box."""
    masks: tuple[Segmentation, ...] | None
    """(n,) the objects' masks; None where a data set has none."""
    image_id: int
    """The image's number, of which a data set has no two alike."""

    def __len__(self) -> int:
        """Count the objects."""
        return len(self.labels)


@dataclass(frozen=True)
class Part:
    """Pictures whose images lie in one place."""

    pictures: Sequence[Picture]
    files: Files
    digest: str
    """Of the annotations, as they were read."""


class DetectionSet:
    """A split of a data set: pictures by position, from 0 to ``len(set) - 1``.

    All annotations are read and checked when it is opened, and images when they are asked for.

    Args:
        name: what it is and where it lies, for people.
        classes: class names, in the order of their labels.
        parts: its pictures, those without objects included, by the place of their images.

    Raises:
        DataError: there is no picture, or two have the same number.
    """

    def __init__(self, name: str, classes: tuple[str, ...], parts: Sequence[Part]) -> None:
        self.name, self.classes, self._parts = name, classes, tuple(parts)
        self._entries = [(picture, part.files) for part in parts for picture in part.pictures]
        if not self._entries:
            raise DataError(f"{name} has no images")
        files: dict[int, str] = {}
        for picture, _ in self._entries:
            if picture.image_id in files:
                raise DataError(
                    f"{name} has two images with the number {picture.image_id}: "
                    f"{files[picture.image_id]} and {picture.file}"
                )
            files[picture.image_id] = picture.file

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self._entries)

    def picture(self, index: int) -> Picture:
        """Return a picture's objects."""
        return self._entries[index][0]

    def pictures(self) -> list[Picture]:
        """Return the objects of all pictures."""
        return [self.picture(index) for index in range(len(self))]

    def read(self, index: int) -> bytes:
        """Return a picture's image as encoded: a JPEG's bytes.

        Raises:
            DataError: they cannot be read; names the image.
        """
        picture, files = self._entries[index]
        return files.read(picture.file)

    def stamp(self) -> str:
        """Return a text that changes when the annotations or the images' files do."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for part in self._parts:
            names = [picture.file for picture in part.pictures]
            digest.update(f"{part.digest}\0{part.files.stamp(names)}\0".encode())
        return digest.hexdigest()
