"""Which images make up which batch: a pure function of (seed, epoch, step, rank, world).

A global batch is the same set of images on any number of ranks, and each rank takes a slice of it.
The same holds for the images that replace bad ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .bad_images import BadImages
from .shuffle import Window, full_shuffle


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a data set's epochs, as one rank sees it."""

    images: int
    """Images in an epoch: the whole data set, or ``chosen``."""
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
    bad: BadImages | None = field(default=None, compare=False)
    """Bad images, which others replace; None: a bad one is an error."""
    window: Window | None = None
    """Shuffles an epoch within a window; None is a full shuffle."""

    def __post_init__(self) -> None:
        assert self.chosen is None or len(self.chosen) == self.images
        assert self.window is None or len(self.window.blocks) == self.images
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
        """Return which images this rank shows in one batch: (batch / world,) data set positions.

        A bad one is replaced by the image that is shown half an epoch later, or if that is bad, by
        the next after it: a function of seed, epoch, place, and the set of bad images, whenever and
        on whichever rank they were found.
        """
        shown = self.drawn_for(epoch, step)
        at = epoch * self.steps + step
        if self.bad is None or not (bad := self.bad.among(shown, at=at)).any():
            return shown
        shown, first = shown.copy(), self.place(step)
        for row in np.flatnonzero(bad).tolist():
            shown[row] = self._substitute(self.bad, epoch, first + row, at)
        return shown

    def drawn_for(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return by which images the parameters of one batch are drawn: (batch / world,) positions.

        They are those of ``indices``, except at the places of bad images: there the parameters are
        the bad image's, so that no image is shown twice alike.
        """
        assert 0 <= step < self.steps
        start = self.place(step)
        return self._at(epoch, slice(start, start + self.batch // self.world))

    def _at(self, epoch: int, places: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images at some places of the order of an epoch."""
        images = _permutation(self.images, self.seed, epoch, self.window)[places]
        return images if self.chosen is None else self.chosen[images]

    def _substitute(self, bad: BadImages, epoch: int, place: int, at: int) -> int:
        """Return the image that replaces a bad one."""
        first = place + self.images // 2
        most = len(bad) + 1  # of so many in a row, one is not known to be bad
        others = self._at(epoch, np.arange(first, first + most) % self.images)
        return int(others[~bad.among(others, at=at)][0])


@lru_cache(maxsize=2)
def _permutation(images: int, seed: int, epoch: int, window: Window | None) -> NDArray[np.int64]:
    """Shuffle the images: one permutation for each (seed, epoch)."""
    if window is None:
        permutation = full_shuffle(images, seed, epoch)
    else:
        permutation = window.permutation(seed, epoch)
    permutation.flags.writeable = False
    return permutation
