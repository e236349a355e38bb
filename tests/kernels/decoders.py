"""The JPEG decoder, called in the way the kernels call it, and jobs that call a decoder."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fastsiam.kernels import library
from fastsiam.kernels.jpeg import decoder
from fastsiam.pipelines.cuts import Cuts
from fastsiam.pipelines.job import JPEG, Images, Job

Box = Sequence[int]
"""Top, left, bottom, right."""
Pixels = NDArray[np.uint8]
ROOM_BEHIND = 64
_UNTOUCHED = 77


class DecodedImage(ctypes.Structure):
    """``struct Image`` of job.h."""

    _fields_ = [
        ("pixels", ctypes.c_void_p),
        ("pitch", ctypes.c_int64),
        ("top", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("end", ctypes.c_void_p),
    ]


DECODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.c_void_p, ctypes.POINTER(DecodedImage)),
)


def decode(
    data: bytes, box: Box | None = None, size: tuple[int, int] | None = None
) -> tuple[Pixels, DecodedImage] | None:
    """Decode a box of a JPEG and check that nothing outside the buffer was written.

    Args:
        data: the JPEG.
        box: top, left, bottom, right; by default the entire image.
        size: height and width to pass to the decoder; by default the image's own.

    Returns:
        The box's pixels and the ``Image`` struct, or None if the decoder rejected the JPEG.
    """
    height, width = size or Image.open(io.BytesIO(data)).size[::-1]
    top, left, bottom, right = box or (0, 0, height, width)
    corners = (ctypes.c_int32 * 4)(top, left, bottom, right)
    buffer = np.full(3 * height * width + 2 * ROOM_BEHIND, _UNTOUCHED, np.uint8)
    image, address = DecodedImage(), decoder()
    assert address
    if DECODE(address)(data, len(data), height, width, corners, buffer.ctypes.data, image):
        return None
    assert 0 <= image.top <= top and 0 <= image.left <= left
    begin = image.pixels - buffer.ctypes.data
    last = begin + image.pitch * (bottom - image.top - 1) + 3 * (right - image.left)
    assert begin >= 0 and last <= image.end - buffer.ctypes.data <= len(buffer) - ROOM_BEHIND
    assert (buffer[-ROOM_BEHIND:] == _UNTOUCHED).all()
    part = np.lib.stride_tricks.as_strided(
        buffer[begin:], (bottom - image.top, right - image.left, 3), (image.pitch, 3, 1)
    )
    return part[top - image.top :, left - image.left :], image


def job_of_jpeg(height: int, width: int, decode: Any) -> Job:
    """Return a job for one pixel of a JPEG, decoded by a Python function."""
    images = Images.of_pixels(np.zeros(1, np.int64), np.array([(height, width)]))
    images.form[:] = JPEG
    corner = np.zeros((1, 1, 2), np.int32)
    cuts = Cuts(np.array([[[0, 0, 1, 1]]], "i4"), np.zeros((1, 1), "?"), corner + 1, corner)
    crops = (torch.zeros(1, 1, 1, 1, 3, dtype=torch.uint8),)
    return Job(images, [cuts], crops, decode=library.address(decode))
