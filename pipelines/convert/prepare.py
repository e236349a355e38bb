"""Preparation of one image for a .beton file. The image keeps its encoded bytes if possible."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass

from PIL import Image

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.kernels.jpeg import is_certain_to_decode

from ..store import Store
from ..store.beton import JPEG, LARGEST_PAGE, RAW
from ..store.decode import MOST_PIXELS, ImageRules, decode
from ..store.probe import Bytes, Flags, Probe, ends, probe

UNCHANGED = "unchanged"
_LARGEST_SIDE = 65_500
"""libjpeg's limit in pixels; the limit of the file format is 65,535."""
_REENCODED = {
    Flags.DEEP: "re-encoded: scaled to 8 bits",
    Flags.NOT_JPEG: "re-encoded: not a JPEG",
    Flags.CMYK: "re-encoded: CMYK",
    Flags.UNUSUAL: "re-encoded: unusual JPEG",
}


@dataclass(frozen=True, slots=True)
class Record:
    """An image as stored in the file."""

    data: Bytes
    mode: int
    """JPEG or RAW."""
    height: int
    width: int
    how: str
    """How the image was processed, e.g. ``UNCHANGED``; the manifest counts images by this."""


def read_image(store: Store, index: int, config: ConvertConfig) -> Record:
    """Read an image and prepare its record.

    Raises:
        ValueError: the image is bad; the message says why.
        DataError: the image cannot be read, or memory is exhausted.
    """
    try:
        data = store.read(index)
        if not store.is_intact(index, data):
            raise ValueError("its bytes do not match the checksum in its file")
        record = prepare(data, store.raw_size(index), config)
    except MemoryError as error:
        raise DataError(f"out of memory at {store.where(index)}: lower --workers") from error
    if len(record.data) > LARGEST_PAGE:
        raise ValueError(f"it is too large ({len(record.data):,} bytes); shrink it with --max-side")
    return record


def prepare(data: Bytes, raw_size: tuple[int, int] | None, config: ConvertConfig) -> Record:
    """Prepare the record of an image.

    A JPEG with one or three 8-bit channels that every decoder can read keeps its bytes. This
    includes gray JPEGs, because FFCV's decoder requests RGB from libjpeg-turbo. An EXIF segment
    that rotates the image is removed, so that every reader shows the same pixels. Any other image
    is decoded, shrunk if the options say so, and encoded.

    Args:
        data: an encoded image, or raw pixels.
        raw_size: (height, width) of raw pixels; None if ``data`` is encoded.
        config: options of the conversion.

    Raises:
        ValueError: the image is bad; the message says why.
    """
    if raw_size is not None:
        height, width = raw_size
        pixels = config.raw is not False
        if pixels and _target(width, height, config) is None:
            return Record(data, RAW, height, width, UNCHANGED)
        processing = "resized" if pixels else "re-encoded: pixels"
        return _encode(decode(data, raw_size), config, processing, pixels=pixels)
    rules = ImageRules(exif=config.exif, alpha=config.alpha)
    try:
        head = probe(data)
    except ValueError as header_error:  # Pillow reads some files whose headers ``probe`` rejects
        try:
            image = decode(data, rules=rules)
        except ValueError:
            raise header_error from None
        return _encode(image, config, "re-encoded: damaged header", pixels=bool(config.raw))
    _check(head, data)
    processing = _reencode_reason(head, rules, config)
    if processing != UNCHANGED:
        return _encode(decode(data, rules=rules), config, processing, pixels=bool(config.raw))
    if not is_certain_to_decode(data, head.height, head.width):
        decode(data)  # an image that Pillow rejects is bad, as in loaders
    if head.rotation:
        edges = [0, *itertools.chain(*head.rotation), len(data)]
        data = b"".join(data[slice(*span)] for span in zip(edges[::2], edges[1::2], strict=True))
        processing = "EXIF rotation left out"
    return Record(data, JPEG, head.height, head.width, processing)


def _check(head: Probe, data: Bytes) -> None:
    """Raise a ValueError if an image is too large or truncated."""
    if head.height * head.width > MOST_PIXELS or max(head.height, head.width) > _LARGEST_SIDE:
        raise ValueError(
            f"it declares {head.width:,} x {head.height:,} pixels, more than "
            f"{MOST_PIXELS:,} or a side above {_LARGEST_SIDE:,}"
        )
    if head.scan and not ends(data, head.scan):
        raise ValueError("it is truncated: it has no end marker")


def _reencode_reason(head: Probe, rules: ImageRules, config: ConvertConfig) -> str:
    """Return why the image cannot keep its bytes, or UNCHANGED if it can."""
    if config.raw:
        return "decoded to pixels"
    for flag, reason in _REENCODED.items():
        if head.flags & flag:
            return reason
    if rules.turns(head):
        return "re-encoded: EXIF rotation applied"
    if _target(head.width, head.height, config) is not None:
        return "re-encoded: resized"
    return UNCHANGED


def _target(width: int, height: int, config: ConvertConfig) -> tuple[int, int] | None:
    """Return the (width, height) to shrink to; None if the image is small enough."""
    scale = 1.0
    if config.short_side:
        scale = min(scale, config.short_side / min(width, height))
    if config.max_side:
        scale = min(scale, config.max_side / max(width, height))
    if scale == 1.0:
        return None
    return max(1, round(width * scale)), max(1, round(height * scale))


def _encode(image: Image.Image, config: ConvertConfig, processing: str, *, pixels: bool) -> Record:
    """Shrink a decoded image if the options say so, and encode it as raw pixels or as a JPEG."""
    target = _target(image.width, image.height, config)
    if target is not None:
        image = image.resize(target, Image.Resampling.LANCZOS)
    if pixels:
        return Record(image.tobytes(), RAW, image.height, image.width, processing)
    buffer = io.BytesIO()
    try:
        image.save(buffer, "JPEG", quality=config.quality)
    except OSError as error:
        raise ValueError(f"it cannot be encoded ({error})") from error
    return Record(buffer.getvalue(), JPEG, image.height, image.width, processing)
