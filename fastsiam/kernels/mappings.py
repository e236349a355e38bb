"""How truncated memory-mapped files are handled: one error that names the file.

If a memory-mapped file is truncated, or its disk or server fails, reading it would kill the process
with SIGBUS. ``source/mapped.cpp`` replaces the rest of the mapping by zeros instead. Before a batch
is used, loaders check whether a mapping was lost, which costs one comparison.

Without compiled kernels, SIGBUS kills the process.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fastsiam.errors import BackendError, FileLostError
from fastsiam.kernels import library

_paths: dict[int, tuple[Path, int]] = {}
"""File and size of each mapping, by its place in the compiled table."""
_one_at_a_time = threading.RLock()
"""Reentrant, because the garbage collector may drop a mapping while another is added."""


class Mapping(mmap.mmap):
    """A read-only mapping that can be protected against SIGBUS.

    ``__del__`` removes it from the table of protected mappings, because ``mmap`` unmaps the memory
    before it calls weak references back. Do not call ``close``: it would unmap the memory while the
    mapping is still in the table, and the handler would act on whatever is mapped there next.
    """

    place: int | None = None
    """Place in the compiled table; None if the mapping is not protected."""

    def guard(self, path: Path) -> None:
        """Protect this mapping, which must cover the whole file ``path``."""
        if (compiled := _compiled()) is None:
            return
        compiled.fastsiam_watch_mappings()
        address = np.frombuffer(self, np.uint8).ctypes.data
        with _one_at_a_time:
            place: int = compiled.fastsiam_add_mapping(address, len(self))
            if place >= 0:
                _paths[place] = path, len(self)
                self.place = place

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Remove the mapping from the table, while the memory is still mapped."""
        if self.place is not None and not is_finalizing():
            _drop(self.place)


def watch_again() -> None:
    """Install the SIGBUS handler again, for example after torch replaced it in a loader process."""
    if _paths and (compiled := _compiled()) is not None:
        compiled.fastsiam_watch_mappings()


def some_are_lost() -> bool:
    """Return whether any mapping lost bytes; costs one comparison."""
    return bool(_paths) and _compiled().fastsiam_lost_mappings() > 0


def is_lost(place: int | None) -> bool:
    """Return whether the mapping at a place lost bytes, which now read as zeros."""
    return place is not None and bool(_compiled().fastsiam_is_lost_mapping(place))


def lost_places() -> frozenset[int]:
    """Return the places of all mappings that lost bytes."""
    return frozenset(filter(is_lost, list(_paths))) if some_are_lost() else frozenset()


def check_others(known: frozenset[int]) -> None:
    """Check that only known mappings lost bytes.

    Args:
        known: places of mappings that are known to have lost bytes.

    Raises:
        FileLostError: another mapping lost bytes; names its file.
    """
    for place in lost_places() - known:
        raise lost_error(*_paths[place])


def lost_error(path: Path, size: int) -> FileLostError:
    """Return the error for a file that had ``size`` bytes and lost some or all of them."""
    return FileLostError(f"{_loss(path, size)}; restore it and run the same command to continue")


def _loss(path: Path, size: int) -> str:
    try:
        left = path.stat().st_size
    except OSError:
        return f"{path} was deleted while it was read"
    if left < size:
        return f"{path} was truncated while it was read: {left:,} of {size:,} bytes are left"
    if left > size:
        return f"{path} was overwritten while it was read: it had {size:,} bytes and has {left:,}"
    return f"{path} was overwritten while it was read, or its disk or server failed"


def _drop(place: int) -> None:
    with _one_at_a_time:
        _paths.pop(place, None)
        _compiled().fastsiam_drop_mapping(place)


@cache
def _compiled() -> Any:
    """Return the library with its functions declared; None if it cannot be compiled."""
    try:
        compiled = library.kernels()
    except BackendError:
        return None
    compiled.fastsiam_watch_mappings.argtypes = []
    compiled.fastsiam_watch_mappings.restype = None
    compiled.fastsiam_add_mapping.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    compiled.fastsiam_add_mapping.restype = ctypes.c_int32
    compiled.fastsiam_drop_mapping.argtypes = [ctypes.c_int32]
    compiled.fastsiam_drop_mapping.restype = None
    compiled.fastsiam_lost_mappings.argtypes = []
    compiled.fastsiam_lost_mappings.restype = ctypes.c_int32
    compiled.fastsiam_is_lost_mapping.argtypes = [ctypes.c_int32]
    compiled.fastsiam_is_lost_mapping.restype = ctypes.c_int32
    return compiled
