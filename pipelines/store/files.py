"""Files of a data set that are read by ranges: mapped into memory, or on another machine."""

from __future__ import annotations

import io
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastsiam.errors import DataError, FileLostError, NoImagesError
from fastsiam.files import explained

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .probe import Bytes

_WORTH_A_CALL = 2**14
"""Bytes from which on a range is read ahead."""
_OPEN_FILES = 2**17
"""Files that may be open at once, if the system allows it: twice the number that an index holds."""


class Mapped:
    """A file mapped into memory, read-only.

    A pickle of it holds the path alone: the process that unpickles it maps the file again.

    Raises:
        DataError: it cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _allow_many_files()
        try:
            with explained(DataError, f"cannot read {path}"), path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DataError(f"{path} is empty") from error
        self.view = memoryview(self._map)
        self.address = np.frombuffer(self.view, np.uint8).ctypes.data
        """Of the file's first byte in memory."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes between two places, without a copy."""
        return self.view[start:stop]

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have the system read ranges that will be needed soon, while other work is done.

        Small ranges are left to the system, which reads 128 KiB around a page that is missing.
        """
        for start, stop in ranges:
            if stop - start >= _WORTH_A_CALL:
                page = start - start % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, page, stop - page)

    def find(self, data: bytes, start: int, end: int) -> int:
        """Return where in the file bytes begin that lie between two places in it, -1 if nowhere."""
        return self._map.find(data, start, end)

    def check(self) -> None:
        """Refuse a file that has not the size any more that was mapped.

        Raises:
            FileLostError: names it.
        """
        try:
            size = self._map.size()
        except OSError:  # its server knows it no more
            size = 0
        if size != len(self):
            raise FileLostError(
                f"{self.path} changed while it was read: it had {len(self):,} bytes and has "
                f"{size:,}; restore it and run the same command to continue"
            )

    def __len__(self) -> int:
        """Return the file's size in bytes."""
        return len(self.view)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        return Mapped, (self.path,)


def _allow_many_files() -> None:
    """Raise the limit on open files: each map holds its file open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < (wanted := min(most, _OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


File = Mapped | RemoteFile
"""A file that is read by ranges."""


def open_file(path: Place) -> File:
    """Open a file: map it, or ask for its size.

    Raises:
        DataError: it is not there, cannot be read, or is empty.
    """
    return RemoteFile(path) if isinstance(path, RemotePath) else Mapped(path)


def on_disk(path: Place) -> Path:
    """Return a path of this machine; refuse data that cannot be read in place on another one."""
    if isinstance(path, Path):
        return path
    raise NoImagesError(
        f"{path} holds neither tars nor .beton, which alone are read in place on another machine: "
        "copy it to a disk and name that, or upload what fastsiam convert makes of it"
    )


class FileReader(io.RawIOBase):
    """A part of a file that is read by ranges, for libraries that read Python's files.

    Args:
        read: returns the bytes of the file between two places.
        start: where the part begins.
        end: where it ends.
    """

    def __init__(self, read: Callable[[int, int], Bytes], start: int, end: int) -> None:
        self._read, self._start, self._size, self._at = read, start, end - start, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> Any:
        """Read at most so many bytes, without memory for more than there are; -1 reads all."""
        return super().read(min(size, max(0, self._size - self._at)))

    def readinto(self, into: Any) -> int:
        """Read as many bytes as there is room for, up to the end."""
        stop = min(self._at + len(into), self._size)
        data = self._read(self._start + self._at, self._start + max(self._at, stop))
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at
