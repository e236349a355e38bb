"""Blocks: images that lie side by side in a data set's files, and are read one after the other.

``pipelines.shuffle`` shuffles blocks, so that what is read lies together: on a disk that turns, and
in object storage, that is what makes reading fast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IMAGES = 64
"""Most images of a block: 7 MB of ImageNet's. Larger ones would save little more of what is read at
their edges, 4%, and of a data set that is sorted by class a window would show fewer classes."""


def blocks(file: NDArray[np.integer], offset: NDArray[np.integer]) -> NDArray[np.int64]:
    """Cut images into blocks by where they lie.

    Args:
        file: (images,) number of the file, or shard, that each lies in.
        offset: (images,) where in it, in any unit.

    Returns:
        (images,) number of each one's block, ascending from 0 with file and offset. A block has
        images of one file, neighbours there, and ``IMAGES`` of them but for a file's last one.
    """
    order = np.lexsort((offset, file))
    ordered = np.asarray(file)[order]
    places = np.arange(len(order))
    first = np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, places, 0))
    begins = (places - first) % IMAGES == 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(begins) - 1
    return found


def in_order(images: int) -> NDArray[np.int64]:
    """Cut images into blocks whose positions say where they lie: (images,) block numbers."""
    return np.arange(images) // IMAGES
