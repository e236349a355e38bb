"""Where blocks, images and metadata lie in a .beton file.

FFCV reads a file in pages. No image crosses a page, so that its page cache can read these files.
"""

from __future__ import annotations

import io
import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store.beton import (
    ANNEX_FORMAT,
    FIELD,
    HEADER,
    IMAGE_FIELD,
    INT_FIELD,
    MAGIC,
    MARK,
    METADATA,
    VERSION,
)

BLOCK_BYTES = 2**23
"""About how many bytes the images of a block have in the source."""
_BLOCK_IMAGES = 4096
"""The most images in a block; blocks of a long group hold more, so that it has at most 16."""
_SMALLEST_PAGE, LARGEST_PAGE = 2**23, 2**31


def aligned(offset: int, unit: int) -> int:
    """Round an offset up to a multiple of ``unit``."""
    return offset + -offset % unit


def first_image(images: int) -> int:
    """Return the offset of the first image: after header, fields and the images' metadata."""
    return aligned(HEADER.itemsize + 2 * FIELD.itemsize + images * METADATA.itemsize, 4096)


def block_edges(sizes: NDArray[np.int64], groups: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the first image of every block, and the number of images: (blocks + 1,).

    Args:
        sizes: (images,) bytes of each in the source.
        groups: (images,) the piece of the source that each image lies in, if the source reads
            whole pieces. No block crosses two.
    """
    if groups is None:
        groups = (np.cumsum(sizes) - sizes) // BLOCK_BYTES
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    cuts: list[int] = []
    for first, last in itertools.pairwise(edges):
        # Each block of a group reads the group from its start, so a group has few blocks.
        cuts += range(first, last, max(_BLOCK_IMAGES, -(-(last - first) // 16)))
    return np.array([*(cuts or [0]), len(sizes)], np.int64)


def image_offset(offset: int, length: int) -> int:
    """Return the first offset from ``offset`` on where an image crosses no page of its size.

    Pages are powers of 2, so it crosses no larger page either: none crosses the file's pages.
    """
    page = page_size(length)
    return aligned(offset, page) if offset % page + length > page else offset


def page_size(length: int) -> int:
    """Return the smallest page that holds an image: a power of 2, at least 8 MiB."""
    return max(_SMALLEST_PAGE, 1 << (length - 1).bit_length())


def pack_annex(
    about: dict[str, Any], classes: Sequence[str], crc: NDArray[np.uint32], names: Sequence[str]
) -> bytes:
    """Return what a file holds beyond FFCV's format, as an npz archive with checksums of its own.

    Args:
        about: the split's part of the manifest.
        classes: their names.
        crc: (images,) CRC-32 of each record.
        names: of the images.
    """
    text = json.dumps({"about": about, "classes": list(classes)}).encode()
    joined = "\0".join(name.replace("\0", "_") for name in names)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        text=np.frombuffer(text, np.uint8),
        crc=crc,
        names=np.frombuffer(joined.encode("utf-8", "surrogateescape"), np.uint8),
    )
    return buffer.getvalue()


def head(images: int, page_size: int, table: int, annex_start: int, annex: bytes) -> bytes:
    """Return the first bytes of a file that this program wrote: header and field descriptors.

    Args:
        images: how many there are.
        page_size: a power of 2 that no record crosses.
        table: where the allocation table begins.
        annex_start: where the annex begins.
        annex: as it is packed.
    """
    header, fields = np.zeros(1, HEADER), np.zeros(2, FIELD)
    header[0] = (VERSION, 2, page_size, images, table)
    fields[1] = (INT_FIELD, b"label", bytes(1024))
    mark = [MAGIC, ANNEX_FORMAT, annex_start, len(annex), zlib.crc32(annex)]

    def with_check(check: int) -> bytes:
        fields[0] = (IMAGE_FIELD, b"image", MARK.pack(*mark, check).ljust(1024, b"\0"))
        return header.tobytes() + fields.tobytes()

    return with_check(zlib.crc32(with_check(0)))
