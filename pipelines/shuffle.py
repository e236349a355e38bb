"""Shuffling of epochs: fully, within a window, or as a mixture of data sets.

The order is a function of (seed, epoch), and of the blocks and data sets, which a run records.

Within a window, images that are stored together are read together. The blocks of a data set
(``Store.blocks``) are put in a random order, a new one in each epoch. Then each image is delayed by
a random number of places smaller than the window. So the images of about one window of blocks are
mixed at any time. The last window of an epoch wraps around to its start, so that batches are mixed
equally well there.

An epoch of a mixture (``--data A --data B --weights 0.7,0.3``) has as many images as all data sets
together. The share of each data set is spread evenly over the epoch, so every batch has the same
shares, up to a few images. Each data set is shuffled and used completely, pass after pass. An epoch
continues where the previous one stopped. So all images of a data set are used equally often, give
or take one.

If an epoch takes more images from a data set than it has, some are repeated. Each repetition gets
different views: for each place, ``Mixture.epoch`` returns a number that encodes the position of the
image and its repetition.
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
"""Number of low bits, which hold the position; the bits above hold the repetition."""
_KEYS = 2**20
"""Number of random keys drawn at once for passes over a small data set."""


def full_shuffle(images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a random permutation of the images, (images,), a function of (seed, epoch)."""
    order: NDArray[np.int64] = full_shuffles(images, seed, np.array([epoch]))[0]
    return order


def full_shuffles(images: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the permutations of several epochs: (epochs, images)."""
    key = rng.keys(seed, epochs[:, None], rng.Stream.ORDER, np.arange(images)[None])
    order: NDArray[np.int64] = np.argsort(key, axis=1, kind="stable")
    return order


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The shuffle of ``--shuffle window:N``."""

    images: int
    """N: after the blocks are shuffled, each image moves by fewer places than this."""
    blocks: NDArray[np.int64]
    """(images of the order,) block number of each image, as in ``Store.blocks``."""

    def __len__(self) -> int:
        return len(self.blocks)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: (images of the order,), a permutation of their numbers."""
        count = len(self.blocks)
        block_keys = rng.keys(seed, epoch, rng.Stream.BLOCK, self.blocks)
        reading_order = np.lexsort((self.blocks, block_keys))  # separates blocks with the same key
        delays = rng.uniform(rng.keys(seed, epoch, rng.Stream.ORDER, reading_order), 1)[:, 0]
        due = (np.arange(count) + delays * min(self.images, count)) % count
        return reading_order[np.argsort(due, kind="stable")]


def positions_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Extract the positions in the data set from N numbers of an order: (N,)."""
    return numbers & ((1 << _REPETITION) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The shuffle of a mixture of data sets."""

    sets: NDArray[np.int64]
    """(images,) number of the data set of each image, from 0."""
    weights: tuple[float, ...]
    """Weight of each data set, in any unit."""
    window: int = 0
    """Size of the window within which each data set is shuffled."""
    blocks: NDArray[np.int64] | None = None
    """(images,) block number of each image, as in ``Store.blocks``; None means a full shuffle of
    each data set."""

    def __len__(self) -> int:
        return len(self.sets)

    def epoch(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: (images,) numbers, see ``positions_of``; each is unique."""
        shares = self.shares()
        numbers = []
        for data_set, share in enumerate(shares):
            shuffle_seed = int(rng.keys(seed, rng.Stream.MIXTURE, data_set)[0])
            images = np.flatnonzero(self.sets == data_set)
            numbers.append(self._next(images, shuffle_seed, epoch * share, share))
        key = rng.keys(seed, epoch, rng.Stream.MIXTURE, np.arange(len(self)))
        nth = np.concatenate([np.arange(share) for share in shares])
        due = (nth + rng.uniform(key, 1)[:, 0]) / np.repeat(shares, shares)
        order: NDArray[np.int64] = np.concatenate(numbers)[np.argsort(due, kind="stable")]
        return order

    def shares(self) -> list[int]:
        """Return the number of images of each data set in an epoch; the sum is ``len(self)``."""
        exact = np.array(self.weights) / sum(self.weights) * len(self)
        shares = np.floor(exact).astype(np.int64)
        rest = np.argsort(shares - exact, kind="stable")[: len(self) - shares.sum()]
        shares[rest] += 1
        result: list[int] = shares.tolist()
        return result

    def describe(self, names: Sequence[str]) -> str:
        """Describe in one line the share of each data set, and how often its images are used."""
        counts = np.bincount(self.sets, minlength=len(names)).tolist()
        parts = []
        for name, share, count in zip(names, self.shares(), counts, strict=True):
            usage = f"{count:,} images, each shown {share / count:.2f} times an epoch"
            parts.append(f"{share / len(self):.1%} {name} ({usage})")
        return f"mixture of {', '.join(parts)}"

    def _next(
        self, images: NDArray[np.int64], seed: int, done: int, count: int
    ) -> NDArray[np.int64]:
        """Return the next ``count`` numbers of ``images``, after the first ``done``."""
        first, last = done // len(images), (done + count - 1) // len(images)
        numbers = np.arange(first, last + 1)
        at_once = max(1, _KEYS // len(images))  # a small data set may need a million passes
        passes = [
            images[self._passes(images, seed, part)] + ((part - first) << _REPETITION)[:, None]
            for part in np.split(numbers, range(at_once, len(numbers), at_once))
        ]
        flat = np.concatenate([images[:0], *(part.ravel() for part in passes)])
        return flat[done - first * len(images) :][:count]

    def _passes(
        self, images: NDArray[np.int64], seed: int, numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the orders of some passes over a data set: (passes, images) positions."""
        if self.blocks is None:
            return full_shuffles(len(images), seed, numbers)
        window = Window(self.window, self.blocks[images])
        orders = [window.epoch(seed, number) for number in numbers.tolist()]
        return np.array(orders, np.int64).reshape(len(numbers), len(images))


def shuffle_of(
    data: DataConfig, *, sets: NDArray[np.int64] | None, blocks: NDArray[np.int64] | None
) -> Window | Mixture | None:
    """Return the shuffle of a data set; None means a full shuffle.

    Args:
        data: the weights and the size of the window.
        sets: (images,) data set of each image of the order; None if there is one data set.
        blocks: (images,) block of each image, as in ``Store.blocks``; None without a window.

    Raises:
        DataError: a data set of a mixture has no images.
    """
    if sets is None:
        return None if blocks is None else Window(data.window, blocks)
    counts = np.bincount(sets, minlength=len(data.places))
    if not counts.all():
        empty = data.places[int(np.argmin(counts))]
        raise DataError(f"{empty} has no images to train on: remove it from the mixture")
    return Mixture(sets, data.weights or tuple(counts.tolist()), data.window, blocks)
