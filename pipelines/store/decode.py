"""Decode an encoded image to 8-bit RGB: the same pixels in every pipeline.

docs/data.md lists how bit depths, transparency, orientation and pages are handled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from fastsiam.config.data import Alpha, Exif

from .probe import Bytes, Flags, Probe, first_line, has_alpha, is_deep, opened_by_pillow, probe

MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 2**62)
"""Pillow refuses larger images, so that a header cannot claim any amount of memory."""
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation."""
_BITS_PER_SAMPLE, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT = 258, 262, 284, 339
"""Tags of a TIFF."""
_WHITE_IS_ZERO, _SEPARATE, _SIGNED = 0, 2, 2
"""Values of ``_PHOTOMETRIC``, ``_PLANAR`` and ``_SAMPLE_FORMAT``."""
_BY_PILLOW = int(Flags.NOT_JPEG | Flags.CMYK | Flags.UNUSUAL)


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a file becomes RGB where it leaves a choice; see ``DataConfig``."""

    exif: Exif = "ignore"
    alpha: Alpha = "drop"

    def turns(self, head: Probe) -> bool:
        """Whether the image is transposed after decoding."""
        return self.exif == "apply" and head.orientation in _TRANSPOSE

    def needs_pillow(self, head: Probe) -> bool:
        """Whether Pillow must decode the image: other decoders differ, or know no such rule."""
        return bool(head.flags & _BY_PILLOW) or self.turns(head)

    def size(self, head: Probe) -> tuple[int, int]:
        """Return the (height, width) of the decoded image."""
        swaps = self.turns(head) and head.orientation >= 5
        return (head.width, head.height) if swaps else (head.height, head.width)


def decode(
    data: Bytes, raw_size: tuple[int, int] | None = None, rules: ImageRules = ImageRules()
) -> Image.Image:
    """Decode one image to RGB, or wrap H x W x 3 pixels of a given (height, width).

    Of several pages or frames, the first is decoded.

    Raises:
        ValueError: the bytes are not an image that can be decoded; says why.
    """
    if raw_size is not None:
        return Image.fromarray(np.frombuffer(data, np.uint8).reshape(*raw_size, 3))
    image: Image.Image = opened_by_pillow(data)
    try:
        image = _as_rgb(image, rules)
    except (MemoryError, _RefusedError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever a broken file makes them
        raise ValueError(first_line(error)) from error
    return _turned(image, data) if rules.exif == "apply" else image


class _RefusedError(ValueError):
    """An image that is refused: its range is unknown, or Pillow would misread its pixels."""


def _as_rgb(image: Image.Image, rules: ImageRules) -> Image.Image:
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        _check_tiff(image)
    if is_deep(image):
        deep, image = image, Image.fromarray(_as_eight_bits(image))
        if "transparency" in deep.info:  # of a PNG: the value that is transparent
            image.putalpha(Image.fromarray(np.asarray(deep) != deep.info["transparency"]))
    if image.mode == "La":  # of a TIFF; Pillow converts it to nothing else
        image = image.convert("LA")
    if rules.alpha != "drop" and has_alpha(image):
        behind = Image.new("RGBA", image.size, rules.alpha)
        return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def _check_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    """Refuse a TIFF whose range is unknown, or whose pixels Pillow 13 and older would misread.

    Raises:
        _RefusedError: says why, and what to save instead.
    """
    tags, compressed = image.tag_v2, image.info["compression"] != "raw"
    if image.mode == "I" or _SIGNED in tags.get(_SAMPLE_FORMAT, ()):
        raise _RefusedError(
            "its pixels are signed or 32-bit integers, whose range is unknown; save it with 8 or "
            "16 unsigned bits, or as floats from 0 to 1"
        )
    deep = max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8
    if (deep and tags.get(_PLANAR) == _SEPARATE and not compressed) or (
        image.mode == "F" and tags.prefix == b"MM" and compressed
    ):
        raise _RefusedError(
            "it is a TIFF that Pillow misreads (uncompressed 16-bit planes, or compressed "
            "big-endian floats); save it as gray or RGB of 8 bits"
        )


def _as_eight_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Scale a gray image of more than 8 bits by the range of its type: (H, W) uint8.

    Unsigned integers of up to 16 bits are scaled by 255 / (2^bits - 1), floats by 255, both
    rounded to the nearest.

    Raises:
        _RefusedError: the range is unknown: floats outside 0 to 1.
    """
    tags = getattr(image, "tag_v2", None)  # of a TIFF
    inverted = tags is not None and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if image.mode == "F":
        exact = np.asarray(image).astype(np.float64)
        if not 0 <= exact.min() <= exact.max() <= 1:  # also where one is no number
            raise _RefusedError(
                f"its pixels are floats from {exact.min():g} to {exact.max():g}, and only 0 to 1 "
                "has a meaning; scale them, or save the image with 8 or 16 bits"
            )
        return np.floor((1 - exact if inverted else exact) * 255 + 0.5).astype(np.uint8)
    most = 2 ** (16 if tags is None else tags[_BITS_PER_SAMPLE][0]) - 1
    values = np.asarray(image).astype(np.uint32)  # mode I: 16 bits, of a PNG or PGM
    if inverted:
        values = most - values
    return ((values * 510 + most) // (2 * most)).astype(np.uint8)


def _turned(image: Image.Image, data: Bytes) -> Image.Image:
    """Apply the EXIF orientation of the file that an image was decoded from."""
    try:
        orientation = probe(data).orientation
    except ValueError:  # Pillow reads some files whose header this program refuses
        return image
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image
