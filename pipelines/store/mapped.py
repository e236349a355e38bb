"""A file in memory without a copy: the operating system reads what is looked at."""

from __future__ import annotations

import errno
import mmap
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastsiam.errors import DataError
from fastsiam.files import explained
from fastsiam.kernels import mappings

_WORTH_A_CALL = 2**14
"""Bytes from which on a range is read ahead."""


class Mapped:
    """A file mapped into memory, read-only.

    Bytes that it loses meanwhile are zeros, and ``check`` says so.

    A pickle of it holds the path alone: the process that unpickles it maps the file again.

    Raises:
        DataError: it cannot be opened, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with explained(DataError, f"cannot read {path}"):
                self._map = _mapped(path)
        except ValueError as error:
            raise DataError(f"{path} is empty") from error
        self.view = memoryview(self._map)
        self.address = np.frombuffer(self.view, np.uint8).ctypes.data
        """Of the file's first byte in memory."""
        self._map.guard(path)

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
        """Refuse a file that has not the size any more that was mapped, or could not be read.

        Raises:
            FileLostError: names it.
        """
        try:
            whole = not mappings.is_lost(self._map.place) and self._map.size() == len(self)
        except OSError:  # its server knows it no more
            whole = False
        if not whole:
            raise mappings.lost(self.path, len(self))

    def __len__(self) -> int:
        """Return the file's size in bytes."""
        return len(self.view)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        """Return how to make it again: from its path."""
        return Mapped, (self.path,)


def _mapped(path: Path) -> mappings.Mapping:
    """Map a file, which holds it open: raise the limit on open files if it is reached."""

    def mapping() -> mappings.Mapping:
        with path.open("rb") as file:
            return mappings.Mapping(file.fileno(), 0, access=mmap.ACCESS_READ)

    try:
        return mapping()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return mapping()
