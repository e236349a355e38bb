"""Stateless random numbers: pure functions of a key, identical on any machine and numpy version.

The generator is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): a counter multiplied by an odd constant, then a mixing function. numpy's
generators may change between releases, which would break resumed runs.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """Constants in keys that separate the random streams of different uses.

    The key of a view is (seed, epoch, image, view), where epoch, image and view are not negative.
    Other keys have one of these negative constants instead of the epoch or the image. The values
    must never change, because all orders and subsets depend on them.
    """

    ORDER = -1
    """Full shuffle of an epoch, or delays within a window (``pipelines.shuffle``): (seed, epoch,
    ORDER, image)."""
    LIMIT = -2
    """Subset of ``convert --limit`` (``pipelines.subsets``): (seed, 0, LIMIT, image)."""
    HOLDOUT = -3
    """Subset of ``--holdout`` (``pipelines.subsets``): (0, 0, HOLDOUT, hash of the name)."""
    BLOCK = -4
    """Order of blocks of ``--shuffle window:N`` (``pipelines.shuffle``): (seed, epoch, BLOCK,
    block)."""
    MIXTURE = -5
    """Order of an epoch of a mixture of data sets (``pipelines.shuffle``): (seed, epoch, MIXTURE,
    place). Also (seed, MIXTURE, data set) for the seed of each data set's own shuffles."""
    SHARE = -1
    """Subset with a percentage of every class (``pipelines.subsets``): (seed, SHARE, image).

    It has the same value as ORDER, so Python makes it an alias. This is safe because SHARE replaces
    the epoch, which is not negative in ORDER's keys.
    """


def mix(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit counters of any shape by splitmix64's output function."""
    z = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keys(*parts: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Combine integers into keys.

    Args:
        parts: integers or integer arrays that broadcast together; their order matters.

    Returns:
        uint64 array of the broadcast shape, with at least one axis.
    """
    key = np.zeros(1, np.uint64)
    for part in parts:
        bits = np.atleast_1d(np.asarray(part & _MASK if isinstance(part, int) else part)).astype(
            np.uint64
        )
        key = mix((key ^ bits) + np.uint64(_GAMMA))
    return key


def uniform(key: NDArray[np.uint64], count: int, *, skip: int = 0) -> NDArray[np.float64]:
    """Draw ``count`` uniform numbers in [0, 1) with 53 random bits for each key.

    Args:
        key: keys of any shape.
        count: number of draws per key.
        skip: number of draws to skip in each key's sequence.

    Returns:
        float64 array of shape ``key.shape + (count,)``.
    """
    steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return (mix(key[..., None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53
