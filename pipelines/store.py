"""Data sets as stores: position -> encoded bytes, label, name.

A store holds no file open and keeps its names in one numpy array, so that loader processes share it
without copying.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from fastsiam.errors import DataError

Split = Literal["train", "val"]

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
_SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "test")}


class FolderStore:
    """Image files of a folder.

    With class folders (at any depth below them, as in torchvision's ``ImageFolder``), the label is
    the position of the class folder's name among the sorted names. Without, every label is -1.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        names: list[bytes] = []
        labels: list[int] = []
        flat, folders = _list(root)
        found = [(folder, images) for folder in folders if (images := _walk(root, folder))]
        if flat and found:
            raise DataError(
                f"{root} holds images both by themselves ({flat[0]}) and in folders "
                f"({found[0][0]}/); move the first into class folders, "
                "or point --data at a folder that has only one kind"
            )
        if not flat and not found:
            raise DataError(
                f"{root} holds no images (looked for {', '.join(IMAGE_ENDINGS)}, in it and below)"
            )
        for label, (_, images) in enumerate(found):
            names += images
            labels += [label] * len(images)
        if flat:
            names, labels = [os.fsencode(name) for name in flat], [-1] * len(flat)
        self.classes: tuple[str, ...] = tuple(folder for folder, _ in found)
        self.labels = np.array(labels, np.int64)
        self._names = np.array(names)

    def __len__(self) -> int:
        """Count the images."""
        return len(self._names)

    def path(self, index: int) -> Path:
        """Return where an image lies."""
        return self.root / os.fsdecode(self._names[index])

    def read(self, index: int) -> bytes:
        """Return an image's encoded bytes."""
        try:
            return self.path(index).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.path(index)}: {error.strerror}") from error

    def decode(self, index: int) -> Image.Image:
        """Decode an image to RGB as torchvision's default loader does: EXIF rotation is left alone.

        Raises:
            DataError: the file is missing, truncated, too large or no image; names the file.
        """
        encoded = self.read(index)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                return Image.open(io.BytesIO(encoded)).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise self._bad(index, error) from error

    def _bad(self, index: int, error: Exception) -> DataError:
        reason = str(error).split(":")[0].split("<_io")[0].strip()
        if isinstance(error, UnidentifiedImageError):
            reason = "it is not an image that Pillow can read"
        return DataError(f"cannot decode {self.path(index)}: {reason}; repair or remove the file")


def open_store(root: Path, split: Split) -> FolderStore:
    """Open a split of the data under ``root``.

    ``root/train`` and ``root/val`` (or ``root/test``) are the splits where they exist; otherwise
    ``root`` itself is the training split.

    Raises:
        DataError: there is no such folder, no such split, or no image in it.
    """
    if not root.exists():
        raise DataError(f"no data at {root}: name a folder of images with --data or $FASTSIAM_DATA")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder of images")
    for name in _SPLIT_FOLDERS[split]:
        if (root / name).is_dir():
            return FolderStore(root / name)
    if split == "train":
        return FolderStore(root)
    raise DataError(f"{root} has no val/ or test/ folder")


def _list(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's images and its sub-folders, hidden ones skipped."""
    images, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.lower().endswith(IMAGE_ENDINGS):
                    images.append(entry.name)
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}") from error
    return sorted(images), sorted(folders)


def _walk(root: Path, folder: str) -> list[bytes]:
    """Return the paths, relative to ``root``, of all images in a folder and below it."""
    images, folders = _list(root / folder)
    names = [os.fsencode(os.path.join(folder, name)) for name in images]
    for name in folders:
        names += _walk(root, os.path.join(folder, name))
    return names
