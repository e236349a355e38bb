"""Order of the images in an epoch: a pure function of (seed, epoch, step, rank, world).

A global batch is the same set of images on any number of ranks, and each rank takes a slice of it.
This is also true of images that replace bad ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .bad_images import BadImages
from .shuffle import Mixture, Window, full_shuffle, positions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of images in each epoch, and this rank's share of each batch."""

    images: int
    """Number of images in an epoch: all of the data set, or those in ``chosen``."""
    batch: int
    """Images in a global batch."""
    seed: int
    rank: int = 0
    world: int = 1
    """Number of ranks."""
    chosen: NDArray[np.int64] | None = field(default=None, compare=False)
    """(images,) positions of a subset of the data set, ascending; None means all images."""
    bad: BadImages | None = field(default=None, compare=False)
    """Bad images, which are replaced; None if a bad image is an error."""
    shuffle: Window | Mixture | None = None
    """How an epoch is shuffled; None means a full shuffle."""
    _epochs: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Cache of two epochs: the next begins while the last batches of the previous are loading."""

    def __post_init__(self) -> None:
        assert self.chosen is None or len(self.chosen) == self.images
        assert self.shuffle is None or len(self.shuffle) == self.images
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, not {self.batch}")
        if not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank {self.rank} is out of range for {self.world} ranks, which count from 0"
            )
        if self.batch % self.world:
            raise ValueError(
                f"a global batch of {self.batch} is not divisible by {self.world} ranks; "
                f"choose a multiple of {self.world}"
            )

    @property
    def steps(self) -> int:
        """Number of complete global batches in an epoch; the incomplete last one is dropped."""
        return self.images // self.batch

    def place(self, step: int) -> int:
        """Return the place in the epoch's order of this rank's first image of a batch."""
        return step * self.batch + self.rank * (self.batch // self.world)

    def indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return this rank's images of a batch: (batch / world,) positions in the data set.

        A bad image is replaced by the image half an epoch later in the order, or by the first good
        one after that. The replacement depends on the seed, the epoch, the place and the set of bad
        images, not on when or on which rank they were found.
        """
        positions = positions_of(self.draw_numbers(epoch, step))
        at = epoch * self.steps + step
        if self.bad is None or not (bad := self.bad.contains(positions, at=at)).any():
            return positions
        positions, first = positions.copy(), self.place(step)
        for row in np.flatnonzero(bad).tolist():
            positions[row] = self._substitute(self.bad, epoch, first + row, at)
        return positions

    def draw_numbers(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return the numbers for which a batch's augmentations are drawn: (batch / world,).

        These are the positions from ``indices``, with two exceptions. They give an image that
        occurs twice in an epoch different augmentations. A replacement of a bad image gets those of
        the bad image. Each repetition in a mixture has its own number (``shuffle.positions_of``).
        """
        assert 0 <= step < self.steps
        start = self.place(step)
        return self._numbers_at(epoch, slice(start, start + self.batch // self.world))

    def _numbers_at(self, epoch: int, places: slice | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers, as in ``draw_numbers``, at places of an epoch's order."""
        numbers = self._epoch(epoch)[places]
        if self.chosen is None:
            return numbers
        images = positions_of(numbers)
        return numbers - images + self.chosen[images]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the shuffled numbers of an epoch: (images,), read-only."""
        if (cached_numbers := self._epochs.get(epoch)) is not None:
            return cached_numbers
        order = partial(full_shuffle, self.images) if self.shuffle is None else self.shuffle.epoch
        numbers = order(self.seed, epoch)
        numbers.flags.writeable = False
        for old in sorted(self._epochs)[:-1]:
            self._epochs.pop(old, None)
        self._epochs[epoch] = numbers
        return numbers

    def _substitute(self, bad: BadImages, epoch: int, place: int, at: int) -> int:
        """Return the image that replaces a bad one.

        Of len(bad) + 1 different images, at least one is good. A mixture may repeat images, so all
        places are tried next.
        """
        first = place + self.images // 2
        for count in (len(bad) + 1, self.images):
            candidates = positions_of(
                self._numbers_at(epoch, np.arange(first, first + count) % self.images)
            )
            good = candidates[~bad.contains(candidates, at=at)]
            if len(good):
                return int(good[0])
        raise DataError("no image of this epoch can be decoded: check the data")
