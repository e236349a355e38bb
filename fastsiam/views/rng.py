"""Random numbers that are pure functions of their key: no state, any order, any machine, any numpy.

The generator is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): a counter multiplied by an odd constant, then a mixing function. numpy's
own bit streams are free to change between releases; a run that is resumed years later needs one
that is not.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """Marks in the keys of all draws but those of views, so that no two uses draw the same numbers.

    A view's key is (seed, epoch, image, view), all but the seed from 0 on. A mark is negative and
    stands in place of the epoch or of the image, where no other use has that number. A value
    is part of every order and subset that was ever drawn, and so never changes.
    """

    ORDER = -1
    """The shuffled order of an epoch, ``pipelines.order``: (seed, epoch, ORDER, image)."""
    LIMIT = -2
    """The images that ``convert --limit`` takes, ``pipelines.subsets``: (seed, 0, LIMIT, image)."""
    HOLDOUT = -3
    """The images of ``--holdout``, ``pipelines.subsets``: (0, 0, HOLDOUT, hash of the name)."""
    BLOCK = -4
    """The blocks of an epoch of ``--shuffle window:N``, ``pipelines.shuffle``: (seed, epoch, BLOCK,
    block)."""
    MIXTURE = -5
    """The epochs of a mixture of data sets, ``pipelines.mixture``: (seed, epoch, MIXTURE, place),
    and (seed, MIXTURE, data set) for the seed of each data set's own shuffles."""
    SHARE = -1
    """The images of some percent of every class, ``pipelines.subsets``: (seed, SHARE, image).

    Its number is that of ORDER, of which Python makes it another name. Both may have it because
    SHARE stands in place of the epoch, where an order has a number from 0 on: their keys part
    there, whatever follows.
    """


def mix(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit counters (splitmix64's output function); returns the input's shape."""
    z = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keys(*parts: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Chain whole numbers into keys.

    Args:
        parts: whole numbers or integer arrays that broadcast together; their order matters.

    Returns:
        uint64 array of the broadcast shape (at least one axis).
    """
    key = np.zeros(1, np.uint64)
    for part in parts:
        bits = np.atleast_1d(np.asarray(part & _MASK if isinstance(part, int) else part)).astype(
            np.uint64
        )
        key = mix((key ^ bits) + np.uint64(_GAMMA))
    return key


def uniform(key: NDArray[np.uint64], count: int, *, skip: int = 0) -> NDArray[np.float64]:
    """Draw ``count`` numbers in [0, 1) for each key, 53 random bits each.

    Args:
        key: any shape.
        count: numbers for each.
        skip: how many of a key's numbers come before them.

    Returns:
        ``key.shape + (count,)``.
    """
    steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    return (mix(key[..., None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53
