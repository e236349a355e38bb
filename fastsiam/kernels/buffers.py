"""Pool of reusable memory buffers, which avoids page faults in newly allocated memory.

Zeroing new pages takes as long as a colour operation, and longer than reading a cached file.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
"""Alignment of buffers in bytes (a cache line), for the non-temporal stores of compiled code."""
_MOST_SIZES = 8
"""Maximum number of different buffer sizes in a pool: crop sizes and last batches differ."""


class BufferPool:
    """Pool of arrays whose memory is reused when an array is no longer referenced.

    Args:
        most: maximum number of unused buffers to keep per size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def array(self, shape: tuple[int, ...], dtype: type[Any]) -> NDArray[Any]:
        """Return an uninitialised array.

        Its buffer is reused once this array object is deleted, even if numpy slices of it still
        exist. A tensor or memoryview of the array keeps it alive.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            buffer = self._free[size].pop()
        except LookupError:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            buffer = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
        array: NDArray[Any] = buffer.view(dtype).reshape(shape)
        weakref.finalize(array, self._keep, buffer).atexit = False
        return array

    def clear(self) -> None:
        """Free the unused buffers."""
        self._free.clear()

    def _keep(self, buffer: NDArray[np.uint8]) -> None:
        if len(buffer) not in self._free and len(self._free) >= _MOST_SIZES:
            self._free.clear()
        buffers = self._free.setdefault(len(buffer), [])
        if len(buffers) < self._most:
            buffers.append(buffer)
