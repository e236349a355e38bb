"""Compiled JPEG decoder: libjpeg-turbo with the same settings as Pillow."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int, c_int32, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from fastsiam.kernels import library

_DECODE = CFUNCTYPE(c_int, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p)
"""The function type ``Decode`` in ``source/job.h``."""
_PADDING = 64
"""Bytes that may be written past the decoded pixels; also enough for an ``Image`` structure."""


def decoder() -> int:
    """Return the address of the compiled JPEG decoder (a ``Decode`` in ``source/job.h``).

    Returns 0 if no suitable libjpeg-turbo is available; Pillow then decodes JPEGs.
    """
    jpeg = library.jpeg()
    return 0 if jpeg is None else library.address(jpeg.fastsiam_decode)


def decode_corner(
    data: bytes | memoryview, height: int, width: int, *, rows: int, columns: int
) -> NDArray[np.uint8] | None:
    """Decode the top-left corner of a JPEG.

    Args:
        data: the complete encoded image.
        height: of the complete image, in pixels.
        width: of the complete image, in pixels.
        rows: number of pixel rows to decode.
        columns: number of pixel columns to decode.

    Returns:
        RGB pixels row by row, then unused bytes, as a flat uint8 array. The rows have ``width``
        pixels if ``columns`` equals ``width``; otherwise their length is undefined. None if the
        compiled decoder is missing or rejects the image: Pillow must decide if it is corrupt.

    Raises:
        BackendError: the kernels are missing and cannot be compiled.
    """
    decode = decoder()
    if not decode:
        return None
    box, image = np.array([0, 0, rows, columns], np.int32), np.empty(_PADDING, np.uint8)
    pixels, at = np.empty(3 * height * width + _PADDING, np.uint8), library.at
    encoded = at(np.frombuffer(data, np.uint8)), len(data), height, width
    status = _DECODE(decode)(*encoded, at(box), at(pixels), at(image))
    return None if status else pixels


def is_certain_to_decode(data: bytes | memoryview, height: int, width: int) -> bool:
    """Return whether a JPEG is certain to decode; if False, try Pillow to find out.

    For a baseline image, the decoder reads the header and the first row, and scans the rest for
    markers. For a progressive image, it reads all entropy-coded data.
    """
    if library.kernels_if_any() is None:
        return False
    return decode_corner(data, height, width, rows=1, columns=1) is not None
