"""The compiled decoder of JPEGs: libjpeg-turbo, as Pillow calls it."""

from __future__ import annotations

import logging
from ctypes import CFUNCTYPE, c_int, c_int32, c_int64, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fastsiam.kernels import library

log = logging.getLogger(__name__)

_DECODE = CFUNCTYPE(c_int, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p)
"""``Decode`` in ``source/job.h``."""
_BEHIND = 64
"""Bytes that may be written behind decoded pixels; also the size of the ``Image`` structure."""


@cache
def decoder() -> int:
    """Return the address of the function that decodes JPEGs (``Decode`` in ``source/job.h``).

    0 if fastsiam was compiled without libjpeg-turbo: Pillow decodes then.
    """
    if (jpeg := library.jpeg()) is None:
        log.warning(
            "fastsiam was compiled without libjpeg-turbo's header: Pillow decodes JPEGs, which is "
            "slower; install libjpeg-dev and run python -m fastsiam.kernels.build"
        )
        return 0
    return library.address(jpeg.fastsiam_decode)


def decode_corner(
    data: bytes | memoryview, height: int, width: int, *, rows: int, columns: int
) -> NDArray[np.uint8] | None:
    """Decode a JPEG's first rows and columns; None if only Pillow can tell whether it is damaged.

    Args:
        data: the whole image.
        height: of the whole image, in pixels.
        width: of the whole image.
        rows: how many to decode.
        columns: how many to decode.

    Returns:
        The pixels, uint8 RGB, whose rows are ``width`` wide if ``columns`` is ``width``; and more
        bytes behind them.

    Raises:
        BackendError: the kernels are missing and cannot be compiled.
    """
    if not decoder():
        return None
    box, made = np.array([0, 0, rows, columns], np.int32), np.empty(_BEHIND, np.uint8)
    pixels, at = np.empty(3 * height * width + _BEHIND, np.uint8), library.at
    encoded = at(np.frombuffer(data, np.uint8)), len(data), height, width
    refused = _DECODE(decoder())(*encoded, at(box), at(pixels), at(made))
    return None if refused else pixels


def surely_decodes(data: bytes | memoryview, height: int, width: int) -> bool:
    """Tell whether a JPEG surely decodes; if False, decode it with Pillow to find out.

    Of a baseline image, the decoder reads the header and the first row, and looks for markers in
    the rest. Of a progressive one it reads all code.
    """
    if library.kernels_if_any() is None:
        return False
    return decode_corner(data, height, width, rows=1, columns=1) is not None
