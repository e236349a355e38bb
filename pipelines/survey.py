"""Survey of image headers before training: image sizes and unusual properties."""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .store import Store
from .store.decode import ImageRules
from .store.probe import Flags, Probe

_SAMPLE = 256
"""Number of images whose headers are read."""
_REMOTE_SAMPLE = 32
"""The same for a remote store, whose images are downloaded completely."""
_SAMPLE_GROUPS = 8
"""Number of ``Store.groups`` that a sample comes from, because a group is read completely."""
_MARGIN = 1.25
"""Safety factor, because the other images may be larger than those of a sample."""


def survey(store: Store, rules: ImageRules) -> list[str]:
    """Return a message for each kind of unusual image in a sample, such as 16-bit images."""
    heads = _headers(store, sample_of(store, np.arange(len(store))))
    lines = {
        Flags.ROTATED: "have an EXIF orientation, which is applied"
        if rules.exif == "apply"
        else "have an EXIF orientation, which is ignored; --exif apply turns them upright",
        Flags.TRANSPARENT: "have transparency, which is dropped; --alpha white or --alpha black "
        "draws them over that colour"
        if rules.alpha == "drop"
        else f"have transparency and are drawn over {rules.alpha}",
        Flags.DEEP: "have 16-bit or float pixels, which are scaled to 8 bits; see docs/data.md",
    }
    counts = {flag: sum(bool(head.flags & flag) for head in heads) for flag in lines}
    return [
        f"{counts[flag]:,} of {len(heads):,} sampled images {line}"
        for flag, line in lines.items()
        if counts[flag]
    ]


def decoded_bytes(store: Store, chosen: NDArray[np.int64] | None = None) -> tuple[int, bool]:
    """Return the size of the decoded images in bytes, and whether it is exact.

    If the store does not know the dimensions, headers are read: of all images if they are few, or
    else of a sample, with a safety factor. The size is 0 if no header can be read.
    """
    positions = np.arange(len(store)) if chosen is None else chosen
    if (dimensions := store.dimensions()) is not None:
        return 3 * int(dimensions[positions].prod(1).sum()), True
    sample = sample_of(store, positions)
    sizes = [3 * head.height * head.width for head in _headers(store, sample)]
    if not sizes or len(sample) == len(positions):
        return sum(sizes), True
    return int(len(positions) * np.mean(sizes) * _MARGIN), False


def sample_of(store: Store, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose a sample that is spread evenly over the images ``wanted``.

    If the store has ``groups``, which are read completely, the sample comes from a few of them.
    """
    limit = _REMOTE_SAMPLE if store.is_remote else _SAMPLE
    if len(wanted) <= limit:
        return wanted
    if store.groups is None:
        return wanted[_evenly(len(wanted), limit)]
    groups = store.groups[wanted]
    distinct_groups = np.unique(groups)
    sampled_groups = distinct_groups[_evenly(len(distinct_groups), _SAMPLE_GROUPS)]
    return np.concatenate(
        [wanted[groups == group][: limit // _SAMPLE_GROUPS] for group in sampled_groups]
    )


def _headers(store: Store, sample: NDArray[np.int64]) -> list[Probe]:
    """Read the headers of the sampled images, skipping those that cannot be read."""
    store.prefetch(sample.tolist())
    heads = []
    for index in sample.tolist():
        with contextlib.suppress(DataError):
            heads.append(store.header(index, store.read(index)))
    return heads


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))
