"""Files that are read by byte range: memory-mapped local files, or remote objects."""

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
from fastsiam.files import os_errors_as

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .probe import Bytes

_WORTH_A_CALL = 2**14
"""Minimum size in bytes of a range for which madvise is called."""
_OPEN_FILES = 2**17
"""Wanted limit on open files: twice the maximum number of files in an index."""


class Mapped:
    """A read-only memory-mapped file.

    Only the path is pickled; unpickling maps the file again.

    Raises:
        DataError: the file cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _allow_many_files()
        try:
            with os_errors_as(DataError, f"cannot read {path}"), path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DataError(f"{path} is empty") from error
        self.view = memoryview(self.map)
        self.address = np.frombuffer(self.view, np.uint8).ctypes.data
        """Memory address of the file's first byte."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` to ``stop`` without copying them."""
        return self.view[start:stop]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the OS to read byte ranges into the page cache in the background.

        Ranges below 16 KiB are skipped: the OS reads 128 KiB around a missing page anyway.
        """
        for start, stop in ranges:
            if stop - start >= _WORTH_A_CALL:
                page = start - start % mmap.PAGESIZE
                self.map.madvise(mmap.MADV_WILLNEED, page, stop - page)

    def check(self) -> None:
        """Raise if the file's size has changed since it was mapped.

        Raises:
            FileLostError: the message names the file and both sizes.
        """
        try:
            size = self.map.size()
        except OSError:  # e.g. deleted on a network file system
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
    """Raise the process's limit on open files, because each mapping keeps its file open."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < (target := min(most, _OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, most))


File = Mapped | RemoteFile
"""A file that is read by byte range."""


def open_file(path: Place) -> File:
    """Map a local file, or open a remote one and get its size.

    Raises:
        DataError: the file does not exist, cannot be read, or is empty.
    """
    if not isinstance(path, RemotePath):
        return Mapped(path)
    file = RemoteFile(path)
    if path.cache is not None:
        path.cache.add_file(len(file))
    return file


def require_local_path(path: Place) -> Path:
    """Return a local path unchanged; raise a ``NoImagesError`` if it is remote."""
    if isinstance(path, Path):
        return path
    raise NoImagesError(
        f"{path} holds neither tars nor .beton files, the only remote data that are read in place: "
        "copy it to a local disk and pass that, or upload the output of fastsiam convert"
    )


class FileReader(io.RawIOBase):
    """A Python file object for the bytes from ``start`` to ``end`` of a file.

    ``read`` returns the bytes of the file between two offsets.
    """

    def __init__(self, read: Callable[[int, int], Bytes], start: int, end: int) -> None:
        self._read, self._start, self._size, self._at = read, start, end - start, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    seekable = readable

    def read(self, size: int = -1, /) -> Any:
        """Read up to ``size`` bytes, all if it is -1; allocate no more than remain."""
        return super().read(min(size, max(0, self._size - self._at)))

    def readinto(self, into: Any) -> int:
        """Fill a buffer with the next bytes, up to the end; return their number."""
        stop = min(self._at + len(into), self._size)
        data = self._read(self._start + self._at, self._start + max(self._at, stop))
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at
