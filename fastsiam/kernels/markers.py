"""Search for the markers of a JPEG that end its entropy-coded data.

With compiled kernels it takes 0.01 ms for an ImageNet photograph and releases the GIL; without, it
takes ten times as long.
"""

from __future__ import annotations

import re

import numpy as np

from fastsiam.kernels import library

Bytes = bytes | memoryview

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Any marker except escaped bytes, restart markers and fill bytes."""


def next_marker(data: Bytes, begin: int) -> int:
    """Return the offset of the byte after 0xFF of the first marker from ``begin`` on, or -1."""
    if (compiled := library.kernels_if_any()) is None:
        found = _MARKER.search(data, begin)
        return found.end() - 1 if found else -1
    place: int = compiled.fastsiam_next_marker(
        np.frombuffer(data, np.uint8).ctypes.data, begin, len(data)
    )
    return place
