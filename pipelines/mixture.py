"""Several data sets in one order, each with its share: ``--data A --data B --weights 0.7,0.3``.

An epoch has as many images as all data sets together. Each data set contributes its share, spread
evenly over the epoch, so that every batch has the shares too, up to a few images. A data set is
shuffled and shown as a whole, pass after pass: an epoch continues where the one before stopped. So
the images of a data set are all shown equally often, give or take one, and the order is still a
function of (seed, epoch) alone.

Where an epoch takes more of a data set than it has, images are repeated in it. Each repetition is
drawn other views: ``Mixture.epoch`` returns a number for each place, which holds the position of
the image and its repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.views import rng

from .shuffle import Window, full_shuffle
from .store import Store
from .store.base import in_order

_REPETITION = 40
"""Bits of a number below those of the repetition: they hold the position."""


def positions_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions in the data set of N numbers of an order: (N,)."""
    return numbers & ((1 << _REPETITION) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The shuffle of several data sets."""

    sets: NDArray[np.int64]
    """(images,) number of the data set that each image is of, from 0."""
    weights: tuple[float, ...]
    """Of each data set, in any unit."""
    window: int = 0
    """Size of the window that each data set is shuffled within; 0 means a full shuffle."""
    blocks: NDArray[np.int64] | None = None
    """(images,) number of the block that each lies in, as in ``Store.blocks``, for a window."""

    def __len__(self) -> int:
        """Count the images of the order."""
        return len(self.sets)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: (images,) numbers, see ``positions_of``; each is unique."""
        shares = self.shares()
        numbers = [
            self._next(
                np.flatnonzero(self.sets == one), self._seed(seed, one), epoch * shown, shown
            )
            for one, shown in enumerate(shares)
        ]
        key = rng.keys(seed, epoch, rng.Stream.MIXTURE, np.arange(len(self)))
        nth = np.concatenate([np.arange(shown) for shown in shares])
        due = (nth + rng.uniform(key, 1)[:, 0]) / np.repeat(shares, shares)
        order: NDArray[np.int64] = np.concatenate(numbers)[np.argsort(due, kind="stable")]
        return order

    def shares(self) -> list[int]:
        """Return how many images of each data set an epoch has: all of its images together."""
        exact = np.array(self.weights) / sum(self.weights) * len(self)
        shares = np.floor(exact).astype(np.int64)
        rest = np.argsort(shares - exact, kind="stable")[: len(self) - shares.sum()]
        shares[rest] += 1
        return [int(share) for share in shares]

    def described(self, names: Sequence[str]) -> str:
        """Say in one line what share each data set has, and how often its images are shown.

        Args:
            names: of the data sets.
        """
        counts = np.bincount(self.sets, minlength=len(names)).tolist()
        parts = []
        for name, share, count in zip(names, self.shares(), counts, strict=True):
            often = f"{count:,} images, each shown {share / count:.2f} times an epoch"
            parts.append(f"{share / len(self):.1%} {name} ({often})")
        return f"mixture of {', '.join(parts)}"

    def _next(self, own: NDArray[np.int64], seed: int, done: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of a data set's next images.

        Args:
            own: positions of its images.
            seed: of its shuffles.
            done: how many were shown before.
            count: how many to return.
        """
        if not count:
            return np.empty(0, np.int64)
        first, last = done // len(own), (done + count - 1) // len(own)
        passes = [
            own[self._shuffled(own, seed, number)] + ((number - first) << _REPETITION)
            for number in range(first, last + 1)
        ]
        return np.concatenate(passes)[done - first * len(own) :][:count]

    def _shuffled(self, own: NDArray[np.int64], seed: int, number: int) -> NDArray[np.int64]:
        """Return the order of a pass through a data set: a permutation of its images' ranks."""
        if not self.window or self.blocks is None:
            return full_shuffle(len(own), seed, number)
        return Window(self.window, self.blocks[own]).epoch(seed, number)

    def _seed(self, seed: int, number: int) -> int:
        return int(rng.keys(seed, rng.Stream.MIXTURE, number)[0])


def shuffle_of(
    data: DataConfig,
    store: Store | None,
    *,
    images: int,
    chosen: NDArray[np.int64] | None = None,
    sets: NDArray[np.int64] | None = None,
    blocks: NDArray[np.int64] | None = None,
) -> Window | Mixture | None:
    """Return how a data set is shuffled; None means a full shuffle.

    Args:
        data: has the weights and the size of the window.
        store: the images; None for noise.
        images: how many the order has.
        chosen: (images,) positions in the store of those that the order has; None is all.
        sets: (images,) data set of each; by default the store's.
        blocks: (images,) block of each; by default the store's.

    Raises:
        DataError: a data set of a mixture has no image.
    """
    if store is None:
        return Window(data.window, in_order(images)) if data.window else None
    of_order = slice(None) if chosen is None else chosen
    if blocks is None and data.window:
        blocks = store.blocks()[of_order]
    if sets is None and store.sets is not None:
        sets = store.sets[of_order]
    if sets is None:
        return None if blocks is None else Window(data.window, blocks)
    counts = np.bincount(sets, minlength=len(data.places))
    if not counts.all():
        empty = data.places[int(np.argmin(counts))]
        raise DataError(f"{empty} has no image to train on: leave it out of the mixture")
    return Mixture(sets, data.weights or tuple(counts.tolist()), data.window, blocks)
