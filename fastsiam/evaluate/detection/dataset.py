"""Annotated pictures: boxes, classes and masks of the objects in an image, and where it lies."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import explained

Task = Literal["voc07", "voc0712", "coco"]
"""What is trained and tested on.

``voc07`` is trainval2007 -> test2007, ``voc0712`` trainval2007 and trainval2012 -> test2007,
``coco`` train2017 -> val2017.
"""

Segmentation = list[NDArray[np.float64]] | dict[str, Any]
"""An object's mask as COCO writes it: polygons, each x, y, x, y, ... in pixels; or run lengths,
{"size": [height, width], "counts": numbers or a text}. ``masks`` turns it into pixels."""

Root = Path | zipfile.ZipFile
"""A folder or a zip that holds files by names such as ``VOC2007/JPEGImages/000005.jpg``."""

LARGEST_FILE = 2**28
"""Bytes of the largest file that is read, COCO's annotations apart."""
SLACK = 0.1
"""Share of an image's side by which a box may reach over its edge, as those drawn by hand do."""
EMPTY = "is empty"
"""What ``fault_of`` says of a box without an area."""


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


class DetectionSet:
    """A split of a data set: pictures by position, from 0 to ``len(set) - 1``.

    All annotations are read and checked when it is opened, and images when they are asked for.

    Args:
        name: what it is and where it lies, for people.
        classes: class names, in the order of their labels.
        entries: its pictures, those without objects included, each with the place of its image.
        stamps: texts that change when the annotations or the images' files do.

    Raises:
        DataError: there is no picture, or two have the same number.
    """

    def __init__(
        self,
        name: str,
        classes: tuple[str, ...],
        entries: Sequence[tuple[Picture, Root]],
        stamps: Sequence[str],
    ) -> None:
        self.name, self.classes, self._entries = name, classes, entries
        if not entries:
            raise DataError(f"{name} has no images")
        parts = ["\0".join(classes), *(f"{text}\0" for text in stamps)]
        content = "".join(parts).encode("utf-8", "surrogatepass")  # JSON may hold half a character
        self.stamp = hashlib.sha256(content).hexdigest()
        """A text that changes when the annotations or the images' files do."""
        files: dict[int, str] = {}
        for picture, _ in entries:
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
        picture, root = self._entries[index]
        return read_file(root, picture.file)


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip.

    Raises:
        DataError: it cannot be read or is damaged.
    """
    try:
        with explained(DataError, f"cannot read {path}"):
            return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(
            f"{path} is no whole zip file ({error}); fetch it again, or check it with unzip -t"
        ) from error


def has_file(root: Root, name: str) -> bool:
    """Tell whether a folder or zip holds a file of that name."""
    return (root / name).is_file() if isinstance(root, Path) else name in root.NameToInfo


def place_of(root: Root, name: str) -> str:
    """Return where a file lies, for messages."""
    return str(root / name) if isinstance(root, Path) else f"{root.filename}: {name}"


def read_file(root: Root, name: str, limit: int = LARGEST_FILE) -> bytes:
    """Return a file's bytes; threads may read at once. A zip's checksums are compared.

    Raises:
        DataError: it is not there, cannot be read, or has more than ``limit`` bytes.
    """
    place = place_of(root, name)
    if isinstance(root, Path):
        with explained(DataError, f"cannot read {place}"), (root / name).open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{place} is no file, but a device or a pipe")
            _check_length(place, status.st_size, limit)
            return file.read(status.st_size)
    if not has_file(root, name):
        raise DataError(f"{root.filename} holds no {name}")
    member = root.getinfo(name)
    _check_length(place, max(member.file_size, member.compress_size), limit)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # The others may take gigabytes of memory to read what is damaged.
        raise DataError(f"{place} is compressed in another way than by deflate")
    try:
        with explained(DataError, f"cannot read {root.filename}"):
            return root.read(member)
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{place} is damaged or encrypted ({error}); fetch the zip again"
        ) from error


def _check_length(place: str, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(f"{place} has {size:,} bytes, too large for what it is")


def stamp_images(root: Root, names: Iterable[str], said_by: str) -> str:
    """Return a text that changes when images do: names, sizes and modification times.

    Args:
        root: a folder; or a zip, whose own size and time stand for all its images.
        names: of the images.
        said_by: whose images they are, for messages.

    Raises:
        DataError: names the first image that is missing, and says how many there are.
    """
    digest, missing = hashlib.sha256(), []
    for name in names:
        with explained(DataError, f"cannot read {place_of(root, name)}"):
            if not has_file(root, name):
                missing.append(name)
            elif isinstance(root, Path):
                status = (root / name).stat()
                digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise DataError(
            f"{place_of(root, missing[0])}{more}: not there, but annotated by {said_by}; "
            "unpack or fetch the images again"
        )
    if isinstance(root, Path):
        return digest.hexdigest()
    path = Path(str(root.filename))
    return json.dumps([path.name, path.stat().st_size, path.stat().st_mtime_ns])


def fault_of(box: Sequence[float], height: int, width: int) -> str:
    """Say what is wrong with a box of x0, y0, x1, y1, "" if nothing is.

    Args:
        box: 0-based, in pixels.
        height: of the image.
        width: of the image.
    """
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)):
        return "is not finite"
    if x1 < x0 or y1 < y0:
        return "has its corners reversed"
    outside = f"lies outside its image, which is {width} x {height}"
    if max(-x0, x1 - width) > SLACK * width or max(-y0, y1 - height) > SLACK * height:
        return outside
    if np.float32(x1) == np.float32(x0) or np.float32(y1) == np.float32(y0):  # as it is kept
        return EMPTY
    return outside if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0 else ""


def check_size(where: str, height: object, width: object) -> tuple[int, int]:
    """Return the height and width of an image as whole numbers of pixels.

    Raises:
        DataError: they are not.
    """
    try:
        size = int(height), int(width)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        size = (0, 0)
    if not all(0 < side <= 2**16 for side in size):
        raise DataError(f"{where} says of its image that it is {width!r} x {height!r} pixels")
    return size
