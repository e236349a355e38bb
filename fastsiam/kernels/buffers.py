"""Memory that is used again: the system clears new memory page by page, which takes long.

Clearing takes as long as a colour operation, and longer than reading a cached file.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
"""Bytes of a cache line, to which compiled code stores past the cache."""
_MOST_SIZES = 8
"""Sizes of buffers that are kept, such as those of views of several sides, and of a last batch."""


class BufferPool:
    """Arrays in buffers that are reused once nobody refers to the array.

    Args:
        most: buffers of one size that are kept while nobody uses them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def array(self, shape: tuple[int, ...], dtype: type[Any]) -> NDArray[Any]:
        """Return an array whose values are undefined.

        Its buffer is reused once this object is gone, whatever slices numpy made of it; a tensor or
        a memoryview of it keeps it.
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

    def _keep(self, buffer: NDArray[np.uint8]) -> None:
        if len(buffer) not in self._free and len(self._free) >= _MOST_SIZES:
            self._free.clear()
        buffers = self._free.setdefault(len(buffer), [])
        if len(buffers) < self._most:
            buffers.append(buffer)
