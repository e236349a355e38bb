"""What a batch is made of as one number, which ranks and steps add up.

Each image's part is a hash of its place in the epoch, its position in the data set and all that was
drawn for it. A digest is the sum of these parts modulo 2^64: it does not depend on how a batch is
cut among ranks, processes and threads, nor on what then makes the pixels; but another image, draw
or order changes it. It guards against mistakes, not against forgers.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import rng
from .draws import ViewParams

_MODULUS = 1 << 64
_WORD = 8


def seen_in(params: ViewParams | None, index: NDArray[np.int64], *, epoch: int, place: int) -> int:
    """Return the digest of some images of an epoch that follow one another.

    Args:
        params: what was drawn for them, as whatever makes the views got it; None if nothing was.
        index: (N,) their positions in the data set, as whatever reads them got these.
        epoch: number of the epoch, from 0.
        place: of the first of them in the epoch's order, over all ranks.

    Returns:
        0 to 2^64 - 1. Digests of parts of a batch add up to the batch's: see ``added``.
    """
    key = rng.keys(epoch, place + np.arange(len(index)), index)
    total = int(rng.mix(key).sum())
    if params is not None:
        words = _words(params)
        columns = _columns(len(words), words.shape[-1])
        total += int(rng.mix((key[:, None] + columns) ^ words).sum())
    return total % _MODULUS


def added(*digests: int) -> int:
    """Return the digest of everything that some digests are of."""
    return sum(digests) % _MODULUS


def written(digest: int) -> str:
    """Return a digest as its 16 hexadecimal digits."""
    return f"{digest:016x}"


def _words(params: ViewParams) -> NDArray[np.uint64]:
    """Lay the bytes of all that is drawn for a view side by side: (V, N, words)."""
    fields = [np.ascontiguousarray(getattr(params, name)) for name in params.__slots__]
    views, images = params.flip.shape
    parts = [field.reshape(views, images, -1).view(np.uint8) for field in fields]
    used = sum(part.shape[-1] for part in parts)
    row = np.zeros((views, images, -(-used // _WORD) * _WORD), np.uint8)
    np.concatenate(parts, axis=-1, out=row[..., :used])
    return row.view("<u8")


@lru_cache(maxsize=8)
def _columns(views: int, words: int) -> NDArray[np.uint64]:
    """Return a constant for each word of each view, (V, 1, words): no two can change places."""
    return rng.keys(np.arange(views * words)).reshape(views, 1, words)
