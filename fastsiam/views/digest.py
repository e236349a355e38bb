"""Digests of the images and augmentations in batches, additive over ranks and steps.

Each image contributes a hash of its place in the epoch, its position in the data set and its
augmentation parameters. A digest is the sum of these hashes modulo 2^64. It depends on every image
and parameter and on their order, but not on the pipeline, or on how a batch is divided among ranks,
processes and threads. It detects mistakes but is not cryptographically secure.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import rng
from .draws import ViewParams

_MODULUS = 1 << 64
_WORD = 8


def batch_digest(
    params: ViewParams | None, index: NDArray[np.int64], *, epoch: int, place: int
) -> int:
    """Return the digest of consecutive images of an epoch.

    Args:
        params: augmentation parameters that the pipeline received; None for unaugmented images.
        index: (N,) positions in the data set that the pipeline received.
        epoch: number of the epoch, from 0.
        place: place of the first image in the epoch's order, over all ranks.

    Returns:
        0 to 2^64 - 1. ``sum_digests`` of the parts of a batch is the digest of the batch.
    """
    key = rng.keys(epoch, place + np.arange(len(index)), index)
    total = int(rng.mix(key).sum())
    if params is not None:
        words = _words(params)
        columns = _columns(len(words), words.shape[-1])
        total += int(rng.mix((key[:, None] + columns) ^ words).sum())
    return total % _MODULUS


def sum_digests(*digests: int) -> int:
    """Combine the digests of disjoint sets of images."""
    return sum(digests) % _MODULUS


def hex_digest(digest: int) -> str:
    """Format a digest as 16 hexadecimal digits."""
    return f"{digest:016x}"


def _words(params: ViewParams) -> NDArray[np.uint64]:
    """Concatenate the bytes of all parameters of each view: (V, N, words) uint64."""
    fields = [np.ascontiguousarray(getattr(params, name)) for name in params.__slots__]
    views, images = params.flip.shape
    parts = [field.reshape(views, images, -1).view(np.uint8) for field in fields]
    size = sum(part.shape[-1] for part in parts)
    row = np.zeros((views, images, -(-size // _WORD) * _WORD), np.uint8)
    np.concatenate(parts, axis=-1, out=row[..., :size])
    return row.view("<u8")


@lru_cache(maxsize=8)
def _columns(views: int, words: int) -> NDArray[np.uint64]:
    """Return a constant per word of each view, (V, 1, words), which makes the order matter."""
    return rng.keys(np.arange(views * words)).reshape(views, 1, words)
