"""Prepares one image for a .beton file: it keeps its bytes if possible."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from fastsiam.config import ConvertConfig

from ..store.beton import JPEG, RAW
from ..store.decode import ImageRules, decode
from ..store.probe import Bytes, Flags, Probe, ends, probe

UNCHANGED = "unchanged"
_LARGEST_SIDE = 65_500
"""libjpeg's limit; the file format's is 65,535."""
_REENCODED = {
    int(Flags.DEEP): "re-encoded: scaled to 8 bits",
    int(Flags.NOT_JPEG): "re-encoded: not a JPEG",
    int(Flags.CMYK): "re-encoded: CMYK",
    int(Flags.UNUSUAL): "re-encoded: unusual JPEG",
}


@dataclass(frozen=True, slots=True)
class Record:
    """An image as the file stores it."""

    data: Bytes
    mode: int
    """JPEG or RAW."""
    height: int
    width: int
    how: str
    """What was done to the image, for the manifest."""


def is_lossy(how: str) -> bool:
    """Tell by ``Record.how`` whether an image was encoded as a JPEG unasked, and so lost detail."""
    return how.startswith(tuple(_REENCODED.values()))


def prepare(data: Bytes, raw_size: tuple[int, int] | None, config: ConvertConfig) -> Record:
    """Prepare the record of an image.

    A JPEG of one or three 8-bit channels that every decoder reads keeps its bytes. FFCV's decoder
    asks libjpeg-turbo for RGB, and so makes three equal channels of one. An EXIF segment that asks
    viewers to rotate the image is left out, so that every reader shows the same pixels. Any other
    image is decoded, shrunk if the options say so, and encoded.

    Args:
        data: an encoded image, or pixels.
        raw_size: height and width of pixels.
        config: options of the conversion.

    Raises:
        ValueError: the image is bad; says why.
    """
    if raw_size is not None:
        height, width = raw_size
        pixels = config.raw is not False
        if pixels and _target(width, height, config) is None:
            return Record(data, RAW, height, width, UNCHANGED)
        how = "resized" if pixels else "re-encoded: pixels"
        return _encode(decode(data, raw_size), config, how, pixels=pixels)
    found = _checked(data)
    how = _why_not(found, config)
    if how != UNCHANGED:
        image = decode(data, rules=_rules(config))
        return _encode(image, config, how, pixels=bool(config.raw))
    if found.rotation:
        data, how = _without(data, found.rotation), "EXIF rotation left out"
    return Record(data, JPEG, found.height, found.width, how)


def _checked(data: Bytes) -> Probe:
    """Read an image's header; ValueError if the image is too large or has no end."""
    found = probe(data)
    limit = 2 * (Image.MAX_IMAGE_PIXELS or 2**40)
    if found.height * found.width > limit or max(found.height, found.width) > _LARGEST_SIDE:
        raise ValueError(
            f"it declares {found.width:,} x {found.height:,} pixels, more than "
            f"{limit:,} or a side above {_LARGEST_SIDE:,}"
        )
    if found.scan and not ends(data, found.scan):
        raise ValueError("it is truncated: it has no end marker")
    return found


def _why_not(found: Probe, config: ConvertConfig) -> str:
    """Name the reason why the image cannot stay as it is, or UNCHANGED."""
    if config.raw:
        return "decoded to pixels"
    for flag, how in _REENCODED.items():
        if found.flags & flag:
            return how
    if _rules(config).turns(found):
        return "re-encoded: EXIF rotation applied"
    if _target(found.width, found.height, config) is not None:
        return "re-encoded: resized"
    return UNCHANGED


def _rules(config: ConvertConfig) -> ImageRules:
    return ImageRules(exif=config.exif, alpha=config.alpha)


def _without(data: Bytes, segments: tuple[tuple[int, int], ...]) -> bytes:
    """Cut segments, which are in order, out of a file."""
    edges = [0, *(edge for segment in segments for edge in segment), len(data)]
    return b"".join(data[low:high] for low, high in zip(edges[::2], edges[1::2], strict=True))


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


def _encode(image: Image.Image, config: ConvertConfig, how: str, *, pixels: bool) -> Record:
    """Shrink a decoded image if the options say so; return it as pixels or as a JPEG."""
    target = _target(image.width, image.height, config)
    if target is not None:
        image = image.resize(target, Image.Resampling.LANCZOS)
    if pixels:
        return Record(np.asarray(image).tobytes(), RAW, image.height, image.width, how)
    buffer = io.BytesIO()
    try:
        image.save(buffer, "JPEG", quality=config.quality)
    except OSError as error:
        raise ValueError(f"it cannot be encoded ({error})") from error
    return Record(buffer.getvalue(), JPEG, image.height, image.width, how)
