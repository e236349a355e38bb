"""How an epoch is shuffled: fully, or within a window, so that what lies together is read together.

Within a window, the blocks of a data set (``store.blocks``) follow each other in a random order,
a new one in each epoch. Then each image is delayed by a random number of places below the window's
size, so that at any time the images of about one window of blocks are shown, well mixed. The last
window of an epoch wraps around to its start, so that batches are mixed equally well there.

The order is a function of (seed, epoch) and of the blocks, which a run remembers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.views import rng


def full_shuffle(images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sort the images by a random key of each: one permutation for each (seed, epoch)."""
    key = rng.keys(seed, epoch, rng.Stream.ORDER, np.arange(images))
    return np.argsort(key, kind="stable")


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The shuffle of ``--shuffle window:N``."""

    images: int
    """N: once the blocks have their order, each image moves by fewer places than this."""
    blocks: NDArray[np.int64]
    """(images of the order,) number of the block that each lies in, as in ``Store.blocks``."""

    def __len__(self) -> int:
        """Count the images of the order."""
        return len(self.blocks)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: (images of the order,) each of their numbers once."""
        count = len(self.blocks)
        drawn = rng.keys(seed, epoch, rng.Stream.BLOCK, self.blocks)
        reading = np.lexsort((self.blocks, drawn))  # two blocks with one key stay apart
        later = rng.uniform(rng.keys(seed, epoch, rng.Stream.ORDER, reading), 1)[:, 0]
        due = (np.arange(count) + later * min(self.images, count)) % count
        return reading[np.argsort(due, kind="stable")]
