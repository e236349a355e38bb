"""JPEGs as the planes that their decoder makes, before upsampling and conversion to RGB.

A record (``source/planes.h``) is a small header and one plane for each of Y, Cb and Cr, or Y alone:
where a JPEG's chroma is subsampled, half the bytes of pixels. The rest of decoding takes a small
part of its time, and can be done for a part of the image; it is libjpeg-turbo's to the last bit.
"""

from __future__ import annotations

import struct
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import BackendError
from fastsiam.kernels import library

_HEADER = struct.Struct("<4siiB3s")
_MAGIC = b"FSP1"
_SLACK = 64
"""A record's end, and what rooms for pixels hold beyond them."""
_NO_MEMORY = 2
"""What ``fastsiam_from_planes`` returns then."""
_NOT_WHOLE = "it is damaged: its planes are not as large as it says"

Bytes = bytes | memoryview


def is_record(data: Bytes) -> bool:
    """Tell whether bytes are planes, by how they begin."""
    return data[:4] == _MAGIC


def size_of(data: Bytes) -> tuple[int, int]:
    """Return (height, width) of the image whose planes these are.

    Raises:
        ValueError: they are no planes.
    """
    if len(data) < _HEADER.size or not is_record(data):
        raise ValueError("it is damaged: no planes of a JPEG")
    _, height, width, _, _ = _HEADER.unpack_from(data)
    return height, width


def require() -> None:
    """Raise BackendError if planes cannot be made here."""
    _maker()
    _reader()


def to_planes(data: Bytes, height: int, width: int) -> memoryview | None:
    """Decode a JPEG to its planes.

    Args:
        data: an encoded image.
        height: of it, in pixels.
        width: of it.

    Returns:
        The record; None if the bytes are no JPEG of that size, of gray or YCbCr in 8 bits, or if it
        is damaged or doubtful in any way.

    Raises:
        BackendError: the compiled code is not there.
    """
    source = np.frombuffer(data, np.uint8)
    out = np.empty(_HEADER.size + 3 * height * width + _SLACK, np.uint8)
    made = _maker()(source.ctypes.data, len(source), height, width, out.ctypes.data, len(out))
    return out[:made].data if made else None


def to_pixels(data: Bytes, box: tuple[int, int, int, int] | None = None) -> NDArray[np.uint8]:
    """Make RGB pixels of planes.

    Args:
        data: a record.
        box: top, left, bottom, right of the part that is wanted, inside the image and not empty;
            by default, the image.

    Returns:
        (height, width, 3) pixels of that part.

    Raises:
        ValueError: the record is damaged.
        MemoryError: there is none for a row of it.
        BackendError: the compiled code is not there.
    """
    height, width = size_of(data)
    source = np.frombuffer(data, np.uint8)
    if not 0 < height * width <= 16 * len(source):  # no sample stands for more than 4 x 4 pixels
        raise ValueError(_NOT_WHOLE)
    top, left, bottom, right = box or (0, 0, height, width)
    if not (0 <= top < bottom <= height and 0 <= left < right <= width):
        raise ValueError(f"there is no box {box} in an image of {height} x {width}")
    room = np.empty(3 * height * width + _SLACK, np.uint8)
    own = np.array([top, left, bottom, right], np.int32)
    status = _reader()(
        source.ctypes.data, len(source), height, width, own.ctypes.data, room.ctypes.data
    )
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory for a row of an image of {height} x {width} pixels")
    if status:
        raise ValueError(_NOT_WHOLE)
    return room[: 3 * (bottom - top) * (right - left)].reshape(bottom - top, right - left, 3)


def _maker() -> Any:
    """Return the function that decodes a JPEG."""
    jpeg = library.jpeg()
    if jpeg is None:
        raise BackendError(
            "planes of JPEGs need libjpeg-turbo: install its header (Debian: libjpeg-dev) and a "
            "compiler, and run python -m fastsiam.kernels.build"
        )
    function = jpeg.fastsiam_planes
    function.argtypes = [c_void_p, c_int64, c_int32, c_int32, c_void_p, c_int64]
    function.restype = c_int64
    return function


def _reader() -> Any:
    """Return the function that makes pixels."""
    function = library.kernels().fastsiam_from_planes
    function.argtypes = [c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p]
    return function
