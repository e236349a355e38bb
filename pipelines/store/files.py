"""Files of a data set, here or on another machine."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

from fastsiam.errors import DataError

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .mapped import Mapped
from .probe import Bytes

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
    raise DataError(
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

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, up to the end."""
        stop = self._size if size is None or size < 0 else min(self._at + size, self._size)
        data = bytes(self._read(self._start + self._at, self._start + max(self._at, stop)))
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at
