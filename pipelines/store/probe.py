"""Headers of encoded images: their size, and what is unusual about them.

JPEG headers are read here, in a few microseconds each; Pillow reads other formats. The markers are
those of ITU-T T.81, annex B.
"""

from __future__ import annotations

import enum
import io
import logging
import re
import struct
import warnings
from dataclasses import dataclass

from PIL import Image, ImageFile, UnidentifiedImageError

from fastsiam.kernels.library import next_marker

Bytes = bytes | memoryview
"""An encoded image, or the pixels of a raw image.

A memoryview looks into a mapped file."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Formats that Pillow may find in a file, whatever its name; readers of others start programs."""

# Of large images and odd metadata, which are read or refused all the same.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SOF = {0xC0: 0, 0xC1: 0, 0xC2: 1}
"""Frame headers that every JPEG decoder reads (baseline, extended, progressive)."""
_OTHER_SOF = {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_SOS, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_BETWEEN_SCANS = {_SOS, 0xC4, 0xDB, 0xDD}
"""What may stand between the scans of a progressive image: their headers, and tables."""
_ORIENTATION = 0x0112
_NAMES_ORIENTATION = re.compile(rb"\x01\x12|\x12\x01")


class Flags(enum.IntFlag):
    """What is unusual about an encoded image: not every decoder takes all of these."""

    PROGRESSIVE = 1
    """A progressive JPEG: decoded by software where the hardware takes baseline only."""
    GRAY = 2
    """One channel."""
    CMYK = 4
    """Four channels of ink."""
    NOT_JPEG = 8
    """Another format, whatever the file's name says."""
    ROTATED = 16
    """EXIF asks viewers to turn it; ``--exif apply`` does."""
    UNUSUAL = 64
    """A JPEG that not every decoder reads: coded as RGB, arithmetic, lossless, 12 bits."""
    BAD = 128
    """Its header cannot be read."""
    TRANSPARENT = 512
    """Some of its pixels may be transparent."""
    DEEP = 1024
    """More than 8 bits in a channel, or floats: reduced to 8 bits."""


_PROGRESSIVE, _GRAY, _CMYK = int(Flags.PROGRESSIVE), int(Flags.GRAY), int(Flags.CMYK)
_ROTATED, _UNUSUAL = int(Flags.ROTATED), int(Flags.UNUSUAL)
# Plain numbers: operations on members of an enum take longer than all the rest of a header.


@dataclass(frozen=True, slots=True)
class Probe:
    """An image's header."""

    height: int
    width: int
    """As stored: before the EXIF orientation is applied."""
    flags: int
    """Sum of the ``Flags`` that hold."""
    scan: int = 0
    """JPEG: where the first scan begins."""
    rotation: tuple[tuple[int, int], ...] = ()
    """JPEG: where each EXIF segment begins and ends, if one of them asks to turn it."""
    orientation: int = 0
    """EXIF orientation, 1 to 8; 0 where the file names none.

    Of PNG and WebP the EXIF data count that come before the pixels. Pillow itself turns TIFFs."""


def probe(data: Bytes) -> Probe:
    """Read an image's header.

    Raises:
        ValueError: it is not an image; says why.
    """
    if data[:2] == _SOI:
        return _jpeg(data)
    image = opened_by_pillow(data)
    flags = int(Flags.NOT_JPEG)
    if has_alpha(image):
        flags |= int(Flags.TRANSPARENT)
    if is_deep(image) or ";16" in str(image.tile[:1]):  # as Pillow names 16-bit colours
        flags |= int(Flags.DEEP)
    orientation = _orientation(image.info.get("exif", b"")) if image.format != "TIFF" else 0
    if orientation not in (0, 1):
        flags |= _ROTATED
    return Probe(image.height, image.width, flags, orientation=orientation)


def opened_by_pillow(data: Bytes) -> ImageFile.ImageFile:
    """Let Pillow read an image's header; its pixels are decoded when they are asked for.

    Raises:
        ValueError: it is not an image of a format that is read; says why.
    """
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's parsers raise whatever a broken file makes them
        unknown = isinstance(error, UnidentifiedImageError)
        if not len(data):
            reason = "it is empty"
        elif data[:4] in _TIFF and (unknown or isinstance(error, KeyError)):
            reason = "it is a TIFF that Pillow does not read; save it as gray or RGB of 8 bits"
        else:
            reason = "it is not an image" if unknown else first_line(error)
        raise ValueError(reason) from error


def first_line(error: Exception) -> str:
    """Return the reason that an error of Pillow gives, without addresses of objects."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return reason.split(":")[0].split("<_io")[0].strip()


def has_alpha(image: Image.Image) -> bool:
    """Tell whether some pixels of an image may be transparent."""
    return image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info


def is_deep(image: Image.Image) -> bool:
    """Tell whether an image is gray of more than 8 bits, or of floats."""
    return image.mode.startswith("I") or image.mode == "F"


def ends(data: Bytes, scan: int) -> bool:
    """Tell whether a JPEG has its end marker after the beginning of its first scan."""
    return data[-2:] == _EOI or bytes(data).rfind(_EOI, scan) >= 0


def is_all_code(data: Bytes, head: Probe) -> bool:
    """Tell whether a JPEG has nothing but code from its first scan to its end marker.

    Where it is cut off, or contains something else, PIL can refuse what another
    decoder makes up, or does not look at because it lies beside a crop.

    Args:
        data: the whole image.
        head: its header.
    """
    place = head.scan
    while (at := next_marker(data, place)) >= 0:
        if data[at] == _EOI[1]:
            return True
        if not (head.flags & _PROGRESSIVE and data[at] in _BETWEEN_SCANS) or at + 3 > len(data):
            return False
        place = at + 1 + (data[at + 1] << 8 | data[at + 2])
    return False


def _jpeg(data: Bytes) -> Probe:
    """Walk from marker to marker up to the first scan."""
    flags, size, adobe, orientation = 0, (0, 0), -1, 0
    exif: list[tuple[int, int]] = []
    place, end = 2, len(data)
    while place + 4 <= end:
        if data[place] != 0xFF:
            raise ValueError("its JPEG header is damaged")
        marker = data[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
            continue
        length = data[place + 2] << 8 | data[place + 3]
        body, following = place + 4, place + 2 + length
        if length < 2 or following > end:
            break
        if marker in _SOF or marker in _OTHER_SOF:
            if length < 8 or length < 8 + 3 * data[body + 5]:
                raise ValueError("its JPEG header is damaged")
            bits, height, width, channels = struct.unpack_from(">BHHB", data, body)
            size = (height, width)
            if marker in _OTHER_SOF or bits != 8:
                flags |= _UNUSUAL
            elif _SOF[marker]:
                flags |= _PROGRESSIVE
            if channels == 1:
                flags |= _GRAY
            elif channels == 4:
                flags |= _CMYK
            elif channels != 3:
                flags |= _UNUSUAL
        elif marker == _APP1 and data[body : body + 6] == b"Exif\x00\x00":
            exif.append((place, following))
            orientation = orientation or _orientation(data[body:following])
            if orientation not in (0, 1):
                flags |= _ROTATED
        elif marker == _APP14 and length >= 14 and data[body : body + 5] == b"Adobe":
            adobe = data[body + 11]
        elif marker == _SOS:
            if 0 in size:
                raise ValueError("its JPEG header names no size")
            if adobe == 0 and not flags & (_GRAY | _CMYK):
                flags |= _UNUSUAL
            rotation = tuple(exif) if flags & _ROTATED else ()
            return Probe(*size, flags, following, rotation, orientation)
        place = following
    raise ValueError("it is truncated within its header")


def _orientation(segment: Bytes) -> int:
    """Return the orientation that an EXIF segment names, 0 if none."""
    if not _NAMES_ORIENTATION.search(segment):
        return 0
    try:
        exif = Image.Exif()
        exif.load(bytes(segment))
        return int(exif.get(_ORIENTATION, 0))
    except Exception:  # damaged EXIF says nothing, and harms nothing
        return 0
