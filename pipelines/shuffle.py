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


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How well an epoch is shuffled, compared with a full shuffle of the same images."""

    moved: float
    """Mean distance from where an image lies to where it is shown, relative to a full shuffle's."""
    parted: float
    """Mean distance at which images that lie side by side are shown, relative to a full shuffle's;
    the epoch is taken as a circle."""
    largest: float
    """Largest share that one class has of a batch; nan where there are no classes."""
    usual: float
    """Mean over the batches of the largest share that one class has of each."""
    largest_full: float
    """``largest`` of a full shuffle."""
    usual_full: float
    """``usual`` of a full shuffle."""


def quality(window: Window, labels: NDArray[np.int64], *, batch: int, seed: int) -> Quality:
    """Measure the shuffle of a run's first epoch.

    Args:
        window: of the run.
        labels: (images,) class of each, or -1.
        batch: images of a global batch.
        seed: the run's.
    """
    shown, count = window.epoch(seed, 0), len(labels)
    place = np.empty(count, np.int64)
    place[shown] = np.arange(count)
    lying = np.argsort(window.blocks, kind="stable")
    full = (count**2 - 1) / (3 * count) or 1.0  # mean distance of two places that are drawn
    moved = np.abs(place[lying] - np.arange(count)).mean()
    between = np.abs(np.diff(place[lying], append=place[lying[0]]))
    parted = np.minimum(between, count - between).mean()
    largest, usual = _largest_classes(labels[shown], batch)
    largest_full, usual_full = _largest_classes(labels[full_shuffle(count, seed, 0)], batch)
    return Quality(
        moved=float(moved / full),
        parted=float(parted / (count / 4)),
        largest=largest,
        usual=usual,
        largest_full=largest_full,
        usual_full=usual_full,
    )


def described(window: Window, labels: NDArray[np.int64], *, batch: int, seed: int) -> str:
    """Say in one line how well a run's images are shuffled."""
    found = quality(window, labels, batch=batch, seed=seed)
    line = (
        f"shuffle within a window of {window.images:,} images, of "
        f"{len(np.unique(window.blocks)):,} blocks: beside a full shuffle an image moves "
        f"{found.moved:.0%} as far, and neighbours part by {found.parted:.1%}"
    )
    if np.isnan(found.largest):
        return line
    return (
        f"{line}; the largest class of a batch has up to {found.largest:.1%} of it, "
        f"{found.usual:.1%} in the mean (full shuffle: {found.largest_full:.1%}, "
        f"{found.usual_full:.1%})"
    )


def _largest_classes(labels: NDArray[np.int64], batch: int) -> tuple[float, float]:
    """Return the largest share of a class in any batch, and the mean of the batches' largest."""
    steps, classes = len(labels) // batch, int(labels.max(initial=-1)) + 1
    if not steps or classes < 2:
        return float("nan"), float("nan")
    whole = labels[: steps * batch]
    step = np.arange(len(whole)) // batch
    known, counts = np.unique((step * classes + whole)[whole >= 0], return_counts=True)
    most = np.zeros(steps, np.int64)
    np.maximum.at(most, known // classes, counts)
    return float(most.max() / batch), float(most.mean() / batch)
