"""How an epoch is shuffled: fully, within a window, or as a mixture of data sets.

The order is a function of (seed, epoch), and of the blocks and data sets, which a run remembers.

Within a window, what lies together is read together. The blocks of a data set (``store.blocks``)
follow each other in a random order, a new one in each epoch. Then each image is delayed by a random
number of places below the window's size, so that at any time the images of about one window of
blocks are shown, well mixed. The last window of an epoch wraps around to its start, so that batches
are mixed equally well there.

An epoch of a mixture (``--data A --data B --weights 0.7,0.3``) has as many images as all data sets
together. Each data set contributes its share, spread evenly over the epoch, so that every batch has
the shares too, up to a few images. A data set is shuffled and shown as a whole, pass after pass: an
epoch continues where the one before stopped. So the images of a data set are all shown equally
often, give or take one.

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

_REPETITION = 40
"""Bits of a number below those of the repetition: they hold the position."""


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
    """Size of the window that each data set is shuffled within."""
    blocks: NDArray[np.int64] | None = None
    """(images,) number of the block that each lies in, as in ``Store.blocks``; None means a full
    shuffle of each data set."""

    def __len__(self) -> int:
        """Count the images of the order."""
        return len(self.sets)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: (images,) numbers, see ``positions_of``; each is unique."""
        shares = self.shares()
        numbers = []
        for one, shown in enumerate(shares):
            own_seed = int(rng.keys(seed, rng.Stream.MIXTURE, one)[0])
            own = np.flatnonzero(self.sets == one)
            numbers.append(self._next(own, own_seed, epoch * shown, shown))
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
        whole: list[int] = shares.tolist()
        return whole

    def described(self, names: Sequence[str]) -> str:
        """Say in one line what share each data set has, and how often its images are shown."""
        counts = np.bincount(self.sets, minlength=len(names)).tolist()
        parts = []
        for name, share, count in zip(names, self.shares(), counts, strict=True):
            often = f"{count:,} images, each shown {share / count:.2f} times an epoch"
            parts.append(f"{share / len(self):.1%} {name} ({often})")
        return f"mixture of {', '.join(parts)}"

    def _next(self, own: NDArray[np.int64], seed: int, done: int, count: int) -> NDArray[np.int64]:
        """Return the next ``count`` numbers of the images ``own``, after ``done`` were shown."""
        first, last = done // len(own), (done + count - 1) // len(own)
        passes = [
            own[self._shuffled(own, seed, number)] + ((number - first) << _REPETITION)
            for number in range(first, last + 1)
        ]
        return np.concatenate([own[:0], *passes])[done - first * len(own) :][:count]

    def _shuffled(self, own: NDArray[np.int64], seed: int, number: int) -> NDArray[np.int64]:
        """Return the order of a pass through a data set: a permutation of its images' ranks."""
        if self.blocks is None:
            return full_shuffle(len(own), seed, number)
        return Window(self.window, self.blocks[own]).epoch(seed, number)


def shuffle_of(
    data: DataConfig, *, sets: NDArray[np.int64] | None, blocks: NDArray[np.int64] | None
) -> Window | Mixture | None:
    """Return how a data set is shuffled; None means a full shuffle.

    Args:
        data: has the weights and the size of the window.
        sets: (images,) data set of each image of the order; None if there is one data set.
        blocks: (images,) block of each, as in ``Store.blocks``; None without a window.

    Raises:
        DataError: a data set of a mixture has no image.
    """
    if sets is None:
        return None if blocks is None else Window(data.window, blocks)
    counts = np.bincount(sets, minlength=len(data.places))
    if not counts.all():
        empty = data.places[int(np.argmin(counts))]
        raise DataError(f"{empty} has no image to train on: leave it out of the mixture")
    return Mixture(sets, data.weights or tuple(counts.tolist()), data.window, blocks)
