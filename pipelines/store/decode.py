"""Decoding of image files to 8-bit RGB, with the same pixels in every pipeline.

docs/data.md lists how bit depths, transparency, orientation and pages are handled.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from fastsiam.config.data import Alpha, Exif

from .probe import Bytes, Flags, Probe, has_alpha, is_deep, open_with_pillow, pillow_reason, probe

MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**62)
"""Pillow's limit on the size of an image, which keeps a corrupt header from exhausting memory."""
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that makes an image upright, by EXIF orientation."""
_BITS_PER_SAMPLE, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT = 258, 262, 284, 339
"""TIFF tags."""
_WHITE_IS_ZERO, _SEPARATE, _SIGNED = 0, 2, 2
"""Values of ``_PHOTOMETRIC``, ``_PLANAR`` and ``_SAMPLE_FORMAT``."""
_BY_PILLOW = Flags.NOT_JPEG | Flags.CMYK | Flags.UNUSUAL


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How EXIF orientation and transparency are handled in decoding; see ``DataConfig``."""

    exif: Exif = "ignore"
    alpha: Alpha = "drop"

    def turns(self, head: Probe) -> bool:
        """Return whether an image is rotated or flipped after decoding."""
        return self.exif == "apply" and head.orientation in _TRANSPOSE

    def needs_pillow(self, head: Probe) -> bool:
        """Return whether Pillow must decode: other decoders differ, or do not apply the rules."""
        return bool(head.flags & _BY_PILLOW) or self.turns(head)

    def size(self, head: Probe) -> tuple[int, int]:
        """Return the (height, width) of an image after decoding."""
        swaps = self.turns(head) and head.orientation >= 5
        return (head.width, head.height) if swaps else (head.height, head.width)


def decode(
    data: Bytes, raw_size: tuple[int, int] | None = None, rules: ImageRules = ImageRules()
) -> Image.Image:
    """Decode an image to RGB, or wrap raw H x W x 3 uint8 pixels if ``raw_size`` is (H, W).

    Only the first page or frame is decoded.

    Raises:
        ValueError: the image cannot be decoded; the message is the reason.
    """
    if raw_size is not None:
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(*raw_size, 3))
    image: Image.Image = open_with_pillow(data)
    try:
        image = _as_rgb(image, rules)
    except (MemoryError, _UnsupportedError):
        raise
    except Exception as error:  # Pillow can raise any exception on a corrupt file
        raise ValueError(pillow_reason(error)) from error
    orientation = 0
    if rules.exif == "apply":
        with contextlib.suppress(ValueError):  # Pillow reads some files that ``probe`` rejects
            orientation = probe(data).orientation
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image


class _UnsupportedError(ValueError):
    """An unsupported image: its value range is unknown, or Pillow would misread its pixels."""


def _as_rgb(image: Image.Image, rules: ImageRules) -> Image.Image:
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        _check_tiff(image)
    if is_deep(image):
        deep, image = image, Image.fromarray(_as_eight_bits(image))
        if "transparency" in deep.info:  # PNG: the transparent value
            image.putalpha(Image.fromarray(np.asarray(deep) != deep.info["transparency"]))
    if image.mode == "La":  # TIFF; Pillow supports no other conversion of it
        image = image.convert("LA")
    if rules.alpha != "drop" and has_alpha(image):
        background = Image.new("RGBA", image.size, rules.alpha)
        return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def _check_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    """Raise if a TIFF's value range is unknown, or if Pillow up to version 13 misreads its pixels.

    Raises:
        _UnsupportedError: the message has the reason and a format to save the image in instead.
    """
    tags, is_compressed = image.tag_v2, image.info["compression"] != "raw"
    if image.mode == "I" or _SIGNED in tags.get(_SAMPLE_FORMAT, ()):
        raise _UnsupportedError(
            "its pixels are signed or 32-bit integers, whose range is unknown; save it with 8 or "
            "16 unsigned bits, or as floats from 0 to 1"
        )
    deep = max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8
    if (deep and tags.get(_PLANAR) == _SEPARATE and not is_compressed) or (
        image.mode == "F" and tags.prefix == b"MM" and is_compressed
    ):
        raise _UnsupportedError(
            "it is a TIFF that Pillow misreads (uncompressed 16-bit planes, or compressed "
            "big-endian floats); save it as 8-bit gray or RGB"
        )


def _as_eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Scale a gray image of more than 8 bits by the range of its type: (H, W) uint8.

    Unsigned integers of up to 16 bits are scaled by 255 / (2^bits - 1), floats by 255. Both are
    rounded to the nearest integer.

    Raises:
        _UnsupportedError: floats are outside 0 to 1, so their range is unknown.
    """
    tags = getattr(image, "tag_v2", None)  # TIFF only
    is_inverted = tags is not None and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if image.mode == "F":
        floats = np.asarray(image).astype(np.float64)
        if not 0 <= floats.min() <= floats.max() <= 1:  # False also for NaN
            raise _UnsupportedError(
                f"its pixels are floats from {floats.min():g} to {floats.max():g}, but only 0 to 1 "
                "is supported; scale them, or save the image with 8 or 16 bits"
            )
        return np.floor((1 - floats if is_inverted else floats) * 255 + 0.5).astype(np.uint8)
    most = 2 ** (16 if tags is None else tags[_BITS_PER_SAMPLE][0]) - 1
    values = np.asarray(image).astype(np.uint32)  # mode I: a 16-bit PNG or PGM
    if is_inverted:
        values = most - values
    return ((values * 510 + most) // (2 * most)).astype(np.uint8)
