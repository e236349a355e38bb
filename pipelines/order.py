"""Which images make up which batch: a pure function of (seed, epoch, step, rank, world).

The only place that shuffles. A global batch is the same set of images whatever the number of ranks;
each rank takes its slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fastsiam.views import rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a data set's epochs, as one rank sees it."""

    images: int
    """Images in an epoch: all of the data set, or those that are chosen."""
    batch: int
    """Images in a global batch."""
    seed: int
    """The run's seed."""
    rank: int = 0
    """This rank's number."""
    world: int = 1
    """Number of ranks."""
    chosen: NDArray[np.int64] | None = field(default=None, compare=False)
    """(images,) positions in the data set, ascending, of a subset; None is the whole."""

    def __post_init__(self) -> None:
        assert self.chosen is None or len(self.chosen) == self.images
        if self.batch % self.world:
            raise ValueError(
                f"a global batch of {self.batch} cannot be shared equally by {self.world} ranks; "
                f"choose a multiple of {self.world}"
            )

    @property
    def steps(self) -> int:
        """Whole global batches in an epoch; the incomplete last one is dropped."""
        return self.images // self.batch

    def place(self, step: int) -> int:
        """Return the place in the epoch of this rank's first image of a batch."""
        return step * self.batch + self.rank * (self.batch // self.world)

    def indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return this rank's images of one batch: (batch / world,) positions in the data set."""
        assert 0 <= step < self.steps
        share, start = self.batch // self.world, self.place(step)
        places = _permutation(self.images, self.seed, epoch)[start : start + share]
        return places if self.chosen is None else self.chosen[places]


@lru_cache(maxsize=2)
def _permutation(images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sort the images by a random key of each: one permutation for each (seed, epoch)."""
    key = rng.keys(seed, epoch, rng.Stream.ORDER, np.arange(images))
    permutation = np.argsort(key, kind="stable")
    permutation.flags.writeable = False
    return permutation
