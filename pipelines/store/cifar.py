"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled pixels in a .tar.gz.

A pickle can name any function and have it called when it is read. Here no name leads to a function
of Python's or numpy's: the three names that numpy's arrays need lead to a stand-in, and a
pickle with any other name is refused.
"""

from __future__ import annotations

import io
import pickle  # an unpickler that knows four names  # nosec B403
import pickletools  # executes nothing  # nosec B403
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import tally
from fastsiam.errors import DataError
from fastsiam.files import why

from .base import Split, Store
from .probe import Bytes

SIDE = 32
ARCHIVES = ("cifar-10-python.tar.gz", "cifar-100-python.tar.gz")
_LABELS = ((b"labels", b"label_names"), (b"fine_labels", b"fine_label_names"))
_LARGEST_MEMBER = 2**28
_MOST_MEMOS = 10**6


class CifarStore(Store):
    """Raw 32 x 32 images out of a CIFAR archive, kept in memory (150 MB for the training images).

    Raises:
        DataError: the archive cannot be read, is damaged, or holds anything but plain arrays.
    """

    kind = "archive, in memory"

    def __init__(self, path: Path, split: Split) -> None:
        self.root = path
        pixels: list[NDArray[np.uint8]] = []
        labels: list[NDArray[np.int64]] = []
        names: list[str] = []
        classes: tuple[str, ...] = ()
        for member, content in _pickles(path):
            classes = classes or _class_names(content)
            if b"data" not in content or (split == "train") == member.startswith("test"):
                continue
            rows, own = _images(path, member, content)
            pixels.append(rows)
            labels.append(own)
            names += [f"{member}/{i}" for i in range(len(own))]
        if not pixels or not classes:
            raise DataError(f"{path} holds no {split} images of CIFAR")
        self._pixels = np.concatenate(pixels)
        self.labels, self.classes, self._names = np.concatenate(labels), classes, names
        if self.labels.min() < 0 or self.labels.max() >= len(classes):
            raise DataError(f"{path} has labels without a class name")

    def read(self, index: int) -> Bytes:
        """Return an image's 32 x 32 x 3 pixels."""
        return memoryview(self._pixels[self.position(index)]).cast("B")

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return addresses and lengths of images."""
        size = self._pixels[0].nbytes
        return self._pixels.ctypes.data + size * self.in_whole(indices), np.full(len(indices), size)

    def raw_size(self, index: int) -> tuple[int, int]:
        """Return (32, 32)."""
        return SIDE, SIDE

    def name(self, index: int) -> str:
        """Return the batch file and the image's place in it."""
        return self._names[self.position(index)]

    def dimensions(self) -> NDArray[np.int64]:
        """Return (32, 32) for each image."""
        return np.full((len(self), 2), SIDE)

    def sizes(self) -> NDArray[np.int64]:
        """Return 3072 for each image."""
        return np.full(len(self), SIDE * SIDE * 3)

    def stamp(self) -> str:
        """Return a text that changes with the pixels and labels."""
        return f"{zlib.crc32(self._pixels.data, zlib.crc32(self.labels.data)):08x} {len(self)}"


def _pickles(path: Path) -> Iterator[tuple[str, dict[bytes, Any]]]:
    """Yield the name and content of each pickle of the archive, by name."""
    try:
        with tally(f"reading {path}, files") as done, tarfile.open(path, "r:*") as tar:
            members = [m for m in tar.getmembers() if m.isreg() and m.size <= _LARGEST_MEMBER]
            for member in sorted(members, key=lambda m: m.name):
                name = PurePosixPath(member.name).name
                if name.split("_")[0] in ("data", "test", "train", "batches.meta", "meta"):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield name, _unpickle(path, name, file.read())
                    done.add()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"{path} is no whole CIFAR archive ({why(error)}); fetch it again"
        ) from error


def _class_names(content: dict[bytes, Any]) -> tuple[str, ...]:
    for _, key in _LABELS:
        names = content.get(key)
        if isinstance(names, list) and all(isinstance(name, bytes) for name in names):
            return tuple(name.decode("utf-8", "replace") for name in names)
    return ()


def _images(
    path: Path, member: str, content: dict[bytes, Any]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    labels = next((content[key] for key, _ in _LABELS if key in content), None)
    try:
        _, _, dtype, in_columns, raw = content[b"data"].state
        rows = np.frombuffer(raw, np.uint8).reshape(-1, 3, SIDE, SIDE)
        own = np.array(labels, np.int64)
        if dtype.arguments[0] not in ("u1", b"u1") or in_columns or own.shape != (len(rows),):
            raise ValueError("other types or lengths than CIFAR's")
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: {member} is damaged ({why(error)}); fetch it again") from error
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1)), own


class _StandIn:
    """Stands for an array, a type or a function of numpy's: keeps what the pickle gives it."""

    def __init__(self, *arguments: object) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads a pickle in which all names lead to the stand-in."""

    _KNOWN = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def __init__(self, path: Path, member: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._where = f"{path}: {member}"

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise DataError(
                f"{self._where} names {module}.{name}, which CIFAR's files do not; "
                "nothing of it was run; fetch the archive again from its authors"
            )
        return _StandIn


def _unpickle(path: Path, member: str, data: bytes) -> dict[bytes, Any]:
    """Read a pickle of the archive, which is to be a dict; DataError if it is anything else."""
    try:
        for operation, argument, _ in pickletools.genops(data):
            # An index into a table that the reader makes as long as that: a few bytes for 64 GB.
            if operation.name.endswith(("PUT", "GET")) and int(argument or 0) > _MOST_MEMOS:
                raise ValueError("a memo out of range")
        content = _Unpickler(path, member, io.BytesIO(data), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise DataError(f"{path}: {member} is damaged ({why(error)}); fetch it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: {member} is no file of CIFAR; fetch it again")
    return content
