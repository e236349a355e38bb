"""Mapped files that lose bytes while they are read: one error that names the file.

Reading of a mapped file that was truncated, or whose disk or server fails, ends a process by SIGBUS
without a word. Here (``source/mapped.cpp``) the rest of the mapping becomes zeros instead, and
whoever makes batches of what is read asks whether it is whole before they are used. That costs no
more than to look at one number.

Where the kernels cannot be compiled, SIGBUS is what it always was.
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
"""File and bytes of each mapping, by its place in the compiled table."""
_one_at_a_time = threading.RLock()
"""The garbage collector may drop a mapping in the middle of adding another."""


class Mapping(mmap.mmap):
    """A read-only mapping that can be watched over until its last user is gone.

    ``mmap`` unmaps its memory before it calls weak references back, and after ``__del__``. A place
    that outlived its memory would have the handler answer for whatever is mapped there next. Do not
    call ``close``: it unmaps the memory while the place is still in the table.
    """

    place: int | None = None
    """In the compiled table; None where nothing watches over the mapping."""

    def guard(self, path: Path) -> None:
        """Watch over this mapping of all of a file."""
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
        """Leave the table, while the memory is still mapped."""
        if self.place is not None and not is_finalizing():
            _drop(self.place)


def watch_again() -> None:
    """Handle SIGBUS again where a library may have taken it, as torch does in loader processes."""
    if _paths and (compiled := _compiled()) is not None:
        compiled.fastsiam_watch_mappings()


def some_are_lost() -> bool:
    """Tell whether any mapping lost bytes: one look at a number."""
    return bool(_paths) and _compiled().fastsiam_lost_mappings() > 0


def is_lost(place: int | None) -> bool:
    """Tell whether the mapping at a place lost bytes, which read as zeros now."""
    return place is not None and bool(_compiled().fastsiam_is_lost_mapping(place))


def lost_places() -> frozenset[int]:
    """Return the places of all mappings that lost bytes."""
    return frozenset(filter(is_lost, list(_paths))) if some_are_lost() else frozenset()


def check_others(known: frozenset[int]) -> None:
    """Refuse what was read since if a mapping lost bytes that is not known to have.

    Raises:
        FileLostError: names its file.
    """
    for place in lost_places() - known:
        raise lost(*_paths[place])


def lost(path: Path, size: int) -> FileLostError:
    """Return the error that says what became of a file that had so many bytes."""
    return FileLostError(f"{_became(path, size)}; restore it, and the same command continues")


def _became(path: Path, size: int) -> str:
    try:
        left = path.stat().st_size
    except OSError:
        return f"{path} was lost while it was read: it is not there any more"
    if left < size:
        return f"{path} was truncated while it was read: {left:,} of its {size:,} bytes are left"
    if left > size:
        return f"{path} was overwritten while it was read: it had {size:,} bytes and has {left:,}"
    return f"{path} was overwritten while it was read, or its disk or server failed"


def _drop(place: int) -> None:
    with _one_at_a_time:
        _paths.pop(place, None)
        _compiled().fastsiam_drop_mapping(place)


@cache
def _compiled() -> Any:
    """Return the library with its functions declared; None where there is none."""
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
