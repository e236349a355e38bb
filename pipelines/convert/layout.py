"""Where what is written lies in a .beton file: blocks, pages, and what comes before the images.

FFCV reads a file in pages. No record crosses a page, so that its page cache can read our files.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from ..store.beton import FIELD, HEADER, METADATA

BLOCK_BYTES = 2**23
"""The images of a block have about so many bytes in the source."""
_BLOCK_IMAGES = 4096
"""The most images of a block; those of a long group are longer, so that it has 16 at most."""
_SMALLEST_PAGE, LARGEST_PAGE = 2**23, 2**31


def aligned(at: int, unit: int) -> int:
    """Return the first multiple of ``unit`` from ``at`` on."""
    return at + -at % unit


def first_record(images: int) -> int:
    """Return where the records begin: after header, fields and the metadata of so many images."""
    return aligned(HEADER.itemsize + 2 * FIELD.itemsize + images * METADATA.itemsize, 4096)


def cut(sizes: NDArray[np.int64], groups: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Cut the images into blocks.

    Args:
        sizes: (images,) bytes of each in the source.
        groups: (images,) number of the piece of the source that each lies in, if one has to be
            read as a whole; no block crosses two.

    Returns:
        (blocks + 1,) the first image of every block, and the number of images.
    """
    if groups is None:
        groups = (np.cumsum(sizes) - sizes) // BLOCK_BYTES
    edges = np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(sizes)]])
    cuts = []
    for first, last in itertools.pairwise(edges.tolist()):
        # A group has to be read from its beginning for each block in it, so they are few.
        cuts.append(np.arange(first, last, max(_BLOCK_IMAGES, -(-(last - first) // 16))))
    return np.concatenate([*cuts, [len(sizes)]]).astype(np.int64)


def places(lengths: list[int], at: int) -> tuple[list[int], int]:
    """Lay records one after the other.

    None crosses a page of 8 MiB, and a longer one begins at a multiple of the next power of 2; so
    none crosses a page of the longest one's size, which becomes the file's.

    Args:
        lengths: bytes of each record.
        at: where the first may begin.

    Returns:
        Where each begins, and where the last ends.
    """
    starts = []
    for length in lengths:
        page = page_of(length)
        if at % page + length > page:
            at = aligned(at, page)
        starts.append(at)
        at += length
    return starts, at


def page_of(length: int) -> int:
    """Return the smallest page that holds a record: a power of 2 of 8 MiB or more."""
    return max(_SMALLEST_PAGE, 1 << (length - 1).bit_length()) if length else _SMALLEST_PAGE
