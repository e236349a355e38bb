"""Reuse of memory buffers, because the system clears new memory page by page.

Clearing takes as long as a colour operation, and longer than reading a cached file.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
"""Bytes of a cache line, for the non-temporal stores of compiled code."""
_MOST_SIZES = 8
"""Number of buffer sizes that are kept: views have several sides, and a last batch is smaller."""


class BufferPool:
    """Pool of arrays whose memory is reused when an array is no longer referenced.

    Args:
        most: number of unused buffers of one size to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def array(self, shape: tuple[int, ...], dtype: type[Any]) -> NDArray[Any]:
        """Return an array with undefined values.

        Its buffer is reused once this object is deleted, even if numpy slices of it exist. A tensor
        or memoryview of it keeps the object alive.
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
