"""What becomes of one image on its way into a .beton: taken over as it is, if at all possible."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fastsiam.config import ConvertConfig

from ..store.base import Bytes, decode
from ..store.beton import JPEG, LARGEST_SIDE, RAW
from ..store.probe import Flags, Probe, ends, probe

UNCHANGED = "unchanged"
_REENCODED = {
    int(Flags.NOT_JPEG): "re-encoded: not a JPEG",
    int(Flags.GRAY): "re-encoded: gray",
    int(Flags.CMYK): "re-encoded: CMYK",
    int(Flags.UNUSUAL): "re-encoded: unusual JPEG",
}


@dataclass(frozen=True, slots=True)
class Record:
    """An image as it is stored."""

    data: Bytes
    mode: int
    """JPEG or RAW."""
    height: int
    width: int
    how: str
    """What was done to it, for the manifest."""


def prepare(data: Bytes, raw_size: tuple[int, int] | None, config: ConvertConfig) -> Record:
    """Make the record of an image.

    A JPEG of three 8-bit channels that every decoder reads stays as it is, byte for byte; if its
    EXIF asks viewers to turn it, that segment is left out, so that every reader shows the same
    pixels. Anything else is decoded, shrunk if that is asked for, and encoded.

    Args:
        data: an encoded image, or pixels.
        raw_size: height and width of pixels.
        config: what is asked for.

    Raises:
        ValueError: the image is bad; says why.
    """
    if raw_size is not None:
        height, width = raw_size
        if _target(width, height, config) is None and config.raw is not False:
            return Record(data, RAW, height, width, UNCHANGED)
        return _encode(decode(data, raw_size), config, "re-encoded: pixels")
    found = probe(data)
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 2**40)
    if found.height * found.width > limit or max(found.height, found.width) > LARGEST_SIDE:
        raise ValueError(
            f"it declares {found.width:,} x {found.height:,} pixels, more than "
            f"{limit:,} or a side above {LARGEST_SIDE:,}"
        )
    how = _why_not(data, found, config)
    if how == UNCHANGED:
        if found.rotation is None:
            return Record(data, JPEG, found.height, found.width, how)
        plain = _without_rotation(data, found)
        return Record(plain, JPEG, found.height, found.width, "EXIF rotation left out")
    return _encode(decode(data), config, how)


def _why_not(data: Bytes, found: Probe, config: ConvertConfig) -> str:
    """Name what stands against taking the image over as it is."""
    if config.raw:
        return "decoded to pixels"
    for flag, how in _REENCODED.items():
        if found.flags & flag:
            return how
    if _target(found.width, found.height, config) is not None:
        return "re-encoded: resized"
    if not ends(data, found.scan):
        return "re-encoded: no end marker"  # if it can be decoded at all
    return UNCHANGED


def _without_rotation(data: Bytes, found: Probe) -> Bytes:
    while found.rotation is not None:
        start, end = found.rotation
        data = bytes(data[:start]) + bytes(data[end:])
        found = probe(data)
    return data


def _target(width: int, height: int, config: ConvertConfig) -> tuple[int, int] | None:
    """Return the (width, height) to shrink to, None if the image is small enough."""
    scale = 1.0
    if config.short_side:
        scale = min(scale, config.short_side / min(width, height))
    if config.max_side:
        scale = min(scale, config.max_side / max(width, height))
    if scale == 1.0:
        return None
    return max(1, round(width * scale)), max(1, round(height * scale))


def _encode(image: Image.Image, config: ConvertConfig, how: str) -> Record:
    target = _target(image.width, image.height, config)
    if target is not None:
        image = image.resize(target, Image.Resampling.LANCZOS)
    if config.raw:
        return Record(np.asarray(image).tobytes(), RAW, image.height, image.width, how)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=config.quality)
    return Record(buffer.getvalue(), JPEG, image.height, image.width, how)
