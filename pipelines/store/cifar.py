"""CIFAR-10 and CIFAR-100 in their official form: pickled pixels in a .tar.gz.

Unpickling can run arbitrary code, so only archives with the published checksums are read.
"""

from __future__ import annotations

import hashlib
import pickle  # nosec B403
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import os_errors_as

from .base import Store
from .probe import Bytes
from .splits import Split

SIDE = 32
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-100-python.tar.gz")
MD5 = {"c58f30108f718f92721af3b95e74349a", "eb9058c3a382ffc7106e4002c42a8d85"}
"""Checksums of the archives, as published at https://www.cs.toronto.edu/~kriz/cifar.html."""


class CifarStore(Store):
    """Raw 32 x 32 images of a CIFAR archive, held in memory (150 MB for the training images).

    Raises:
        DataError: the archive cannot be read, or its checksum is not the published one.
    """

    kind = "archive, in memory"

    def __init__(self, path: Path, split: Split) -> None:
        self.root = path
        pixels: list[NDArray[np.uint8]] = []
        labels: list[int] = []
        self._names: list[str] = []
        for member, content in _members(path):
            if names := content.get(b"label_names") or content.get(b"fine_label_names"):
                self.classes = tuple(name.decode() for name in names)
            elif (split == "train") != member.startswith("test"):
                pixels.append(content[b"data"].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))
                batch_labels = content.get(b"labels") or content[b"fine_labels"]
                labels += batch_labels
                self._names += [f"{member}/{i}" for i in range(len(batch_labels))]
        self._pixels = np.ascontiguousarray(np.concatenate(pixels))
        self.labels = np.array(labels, np.int64)
        self.width = self.height = np.full(len(labels), SIDE)

    def read(self, index: int) -> Bytes:
        """Return an image's pixels: 32 x 32 x 3 uint8."""
        return memoryview(self._pixels[self.position(index)]).cast("B")

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the addresses and lengths of images in memory; see ``Store.locate``."""
        size = self._pixels[0].nbytes
        return self._pixels.ctypes.data + size * self.full_positions(indices), np.full(
            len(indices), size
        )

    def raw_size(self, index: int) -> tuple[int, int]:
        """Return (32, 32)."""
        return SIDE, SIDE

    def name(self, index: int) -> str:
        """Return the batch file and the image's position in it, such as ``data_batch_1/0``."""
        return self._names[self.position(index)]

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each image in bytes, all 3,072: (images,)."""
        return np.full(len(self), SIDE * SIDE * 3)

    def stamp(self) -> str:
        """Return a fingerprint of the pixels and labels."""
        return f"{zlib.crc32(self._pixels.data, zlib.crc32(self.labels.data)):08x} {len(self)}"


def _members(path: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    """Yield the name and content of each pickle in the archive, sorted by name."""
    with os_errors_as(DataError, f"cannot read {path}"), path.open("rb") as file:
        if hashlib.file_digest(file, "md5").hexdigest() not in MD5:
            raise DataError(
                f"{path} is not the archive that CIFAR's authors publish (its checksum differs); "
                "fetch it again from https://www.cs.toronto.edu/~kriz/cifar.html"
            )
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:gz") as tar:
            for member in sorted(tar.getmembers(), key=lambda member: member.name):
                name = PurePosixPath(member.name).name
                if name.split("_")[0] in ("data", "test", "train", "batches.meta", "meta"):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield name, pickle.loads(content.read(), encoding="bytes")  # nosec B301
