"""Files of a data set, here or on another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .mapped import Mapped

File = Mapped | RemoteFile
"""A file that is read by ranges."""


def open_file(path: Place) -> File:
    """Open a file: map it, or ask for its size.

    Raises:
        DataError: it is not there, cannot be read, or is empty.
    """
    return RemoteFile(path) if isinstance(path, RemotePath) else Mapped(path)


def allocator(new_chunk: Callable[[], memoryview]) -> Callable[[int], memoryview]:
    """Return a function that allocates memory for one image after the other, out of chunks."""
    rest = memoryview(b"")

    def allocate(size: int) -> memoryview:
        nonlocal rest
        if size > len(rest):
            rest = new_chunk()
        if size > len(rest):
            return np.empty(size, np.uint8).data
        memory, rest = rest[:size], rest[size:]
        return memory

    return allocate


def read_into(
    file: File, start: int, stop: int, allocate: Callable[[int], memoryview]
) -> memoryview:
    """Return the bytes of a range, in memory from ``allocate`` if they have to be copied."""
    if isinstance(file, RemoteFile):
        return file.read(start, stop, allocate)
    return file.read(start, stop)


def located(
    files: Sequence[File],
    file: NDArray[np.integer],
    start: NDArray[np.integer],
    size: NDArray[np.integer],
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return addresses and lengths of N ranges of mapped files; None if a file is not mapped.

    Args:
        files: all of the data set.
        file: (N,) number of each range's file.
        start: (N,) where it begins in the file.
        size: (N,) its bytes.
    """
    addresses = [one.address for one in files if isinstance(one, Mapped)]
    if len(addresses) < len(files):
        return None
    base = np.array(addresses, np.int64)[file]
    return base + start.astype(np.int64), size.astype(np.int64)


def read_ahead(
    files: Sequence[File],
    file: NDArray[np.integer],
    start: NDArray[np.integer],
    size: NDArray[np.integer],
) -> None:
    """Start to fetch N ranges of files that will be read soon; the arguments are ``located``'s."""
    stop = start.astype(np.int64) + size.astype(np.int64)
    for number in np.unique(file).tolist():
        own = file == number
        files[number].ahead(list(zip(start[own].tolist(), stop[own].tolist(), strict=True)))


def on_disk(path: Place) -> Path:
    """Return a path of this machine; refuse data that cannot be read in place on another one."""
    if isinstance(path, Path):
        return path
    raise DataError(
        f"{path} holds neither tars nor .beton, which alone are read in place on another machine: "
        "copy it to a disk and name that, or upload what fastsiam convert makes of it"
    )
