"""Parsing of image headers: size, orientation and unusual features.

JPEG headers are parsed here, in a few microseconds each; Pillow parses other formats. The JPEG
markers are those of ITU-T T.81, annex B.
"""

from __future__ import annotations

import io
import logging
import re
import struct
import warnings
from dataclasses import dataclass

from PIL import Image, ImageFile, UnidentifiedImageError

from fastsiam.files import why
from fastsiam.kernels.library import next_marker

Bytes = bytes | memoryview
"""An encoded image, or the pixels of a raw image; a memoryview if it is part of a mapped file."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats that Pillow may detect, whatever a file's name. Some other readers run programs."""

# Pillow warns about large images and odd metadata; fastsiam reads them or raises an error.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Frame headers. Every JPEG decoder supports those up to ``_PROGRESSIVE``."""
_PROGRESSIVE = 0xC2
_SOS, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_BETWEEN_SCANS = {_SOS, 0xC4, 0xDB, 0xDD}
"""Markers that may appear between the scans of a progressive JPEG: scan headers and tables."""
_ORIENTATION = 0x0112
_DAMAGED = "its JPEG header is damaged"
_NAMES_ORIENTATION = re.compile(rb"\x01\x12|\x12\x01")


class Flags:
    """Bits for unusual features of an encoded image; not every decoder supports them."""

    PROGRESSIVE = 1
    """A progressive JPEG: decoded in software if the hardware supports only baseline."""
    GRAY = 2
    """One channel."""
    CMYK = 4
    """Four channels, CMYK or YCCK."""
    NOT_JPEG = 8
    """Another format than JPEG, whatever the file's name."""
    ROTATED = 16
    """Has an EXIF orientation other than 1; ``--exif apply`` makes the image upright."""
    UNUSUAL = 64
    """A JPEG that not every decoder supports, such as RGB, arithmetic, lossless or 12-bit."""
    BAD = 128
    """The header cannot be parsed."""
    TRANSPARENT = 512
    """Some pixels may be transparent."""
    DEEP = 1024
    """More than 8 bits per channel, or floats; decoding reduces them to 8 bits."""


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's header."""

    height: int
    width: int
    """Size as stored, before the EXIF orientation is applied."""
    flags: int
    """Sum of ``Flags``."""
    scan: int = 0
    """JPEG: offset of the first scan's data."""
    rotation: tuple[tuple[int, int], ...] = ()
    """JPEG: start and end offset of each EXIF segment if ``ROTATED`` is set, else empty."""
    orientation: int = 0
    """EXIF orientation, 1 to 8; 0 if the file has none.

    In PNG and WebP, only EXIF data before the pixels count. It is 0 for TIFFs, which Pillow makes
    upright itself."""


def probe(data: Bytes) -> Probe:
    """Parse an image's header.

    Raises:
        ValueError: the data are not an image; the message is the reason.
    """
    if data[:2] == _SOI:
        return _parse_jpeg(data)
    image = open_with_pillow(data)
    flags = Flags.NOT_JPEG
    if has_alpha(image):
        flags |= Flags.TRANSPARENT
    if is_deep(image) or ";16" in str(image.tile[:1]):  # raw mode of 16-bit colours
        flags |= Flags.DEEP
    orientation = _orientation(image.info.get("exif", b"")) if image.format != "TIFF" else 0
    if orientation not in (0, 1):
        flags |= Flags.ROTATED
    return Probe(image.height, image.width, flags, orientation=orientation)


def open_with_pillow(data: Bytes) -> ImageFile.ImageFile:
    """Open an image with Pillow, which parses the header and decodes the pixels lazily.

    Raises:
        ValueError: the data are not an image of a supported format; the message is the reason.
    """
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # Pillow can raise any exception on a corrupt file
        unknown = isinstance(error, UnidentifiedImageError)
        if not len(data):
            reason = "it is empty"
        elif data[:4] in _TIFF and (unknown or isinstance(error, KeyError)):
            reason = "it is a TIFF that Pillow does not read; save it as 8-bit gray or RGB"
        else:
            reason = "it is not an image" if unknown else pillow_reason(error)
        raise ValueError(reason) from error


def pillow_reason(error: Exception) -> str:
    """Return the reason in a Pillow error's first line, without object addresses."""
    return why(error).split(":")[0].split("<_io")[0].strip()


def has_alpha(image: Image.Image) -> bool:
    """Return whether some pixels of an image may be transparent."""
    return image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info


def is_deep(image: Image.Image) -> bool:
    """Return whether an image is gray with more than 8 bits or with floats."""
    return image.mode.startswith("I") or image.mode == "F"


def ends(data: Bytes, scan: int) -> bool:
    """Return whether a JPEG has an end marker after ``scan``, the start of its first scan."""
    return data[-2:] == _EOI or bytes(data).rfind(_EOI, scan) >= 0


def has_only_entropy_data(data: Bytes, head: Probe) -> bool:
    """Return whether a JPEG has only entropy-coded data from its first scan to its end marker.

    A progressive JPEG may also have scan headers and tables. If a JPEG is truncated or contains
    anything else, PIL can raise an error where another decoder fills in pixels, or skips the bad
    part because it is outside the crop.
    """
    place = head.scan
    while (at := next_marker(data, place)) >= 0:
        if data[at] == _EOI[1]:
            return True
        is_allowed = head.flags & Flags.PROGRESSIVE and data[at] in _BETWEEN_SCANS
        if not is_allowed or at + 3 > len(data):
            return False
        place = at + 1 + (data[at + 1] << 8 | data[at + 2])
    return False


def _parse_jpeg(data: Bytes) -> Probe:
    """Parse a JPEG header: follow the markers up to the first scan."""
    flags, size, adobe, orientation = 0, (0, 0), -1, 0
    exif: list[tuple[int, int]] = []
    place, end = 2, len(data)
    while place + 4 <= end:
        if data[place] != 0xFF:
            raise ValueError(_DAMAGED)
        marker = data[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
            continue
        length = data[place + 2] << 8 | data[place + 3]
        body, segment_end = place + 4, place + 2 + length
        if length < 2 or segment_end > end:
            break
        if marker in _SOF:
            if length < 8 or length < 8 + 3 * data[body + 5]:
                raise ValueError(_DAMAGED)
            bits, height, width, channels = struct.unpack_from(">BHHB", data, body)
            size = (height, width)
            if marker > _PROGRESSIVE or bits != 8:
                flags |= Flags.UNUSUAL
            elif marker == _PROGRESSIVE:
                flags |= Flags.PROGRESSIVE
            flags |= {1: Flags.GRAY, 3: 0, 4: Flags.CMYK}.get(channels, Flags.UNUSUAL)
        elif marker == _APP1 and data[body : body + 6] == b"Exif\x00\x00":
            exif.append((place, segment_end))
            orientation = orientation or _orientation(data[body:segment_end])
            if orientation not in (0, 1):
                flags |= Flags.ROTATED
        elif marker == _APP14 and length >= 14 and data[body : body + 5] == b"Adobe":
            adobe = data[body + 11]
        elif marker == _SOS:
            if 0 in size:
                raise ValueError("its JPEG header has no image size")
            if adobe == 0 and not flags & (Flags.GRAY | Flags.CMYK):
                flags |= Flags.UNUSUAL
            rotation = tuple(exif) if flags & Flags.ROTATED else ()
            return Probe(*size, flags, segment_end, rotation, orientation)
        place = segment_end
    raise ValueError("it is truncated within its header")


def _orientation(segment: Bytes) -> int:
    """Return the orientation in an EXIF segment, 0 if it has none."""
    if not _NAMES_ORIENTATION.search(segment):
        return 0
    try:
        exif = Image.Exif()
        exif.load(bytes(segment))
        return int(exif.get(_ORIENTATION, 0))
    except Exception:  # ignore corrupt EXIF data
        return 0
