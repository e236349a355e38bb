"""A look at image headers before training: how large the images are, and what is unusual."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .store import Store
from .store.decode import ImageRules
from .store.probe import Flags, Probe

_SAMPLE = 256
"""Images whose headers are read."""
_REMOTE_SAMPLE = 32
"""The same of another machine's images, which are fetched whole."""
_SAMPLE_GROUPS = 8
"""Pieces of a source that a sample comes from, where a piece is read as a whole."""
_MARGIN = 1.25
"""Factor by which the other images may be larger than those of a sample."""


@dataclass(frozen=True, slots=True)
class Survey:
    """How many images of a sample have what a user should know of."""

    sampled: int
    rotated: int
    """Have an EXIF orientation other than upright."""
    transparent: int
    deep: int
    """Have more than 8 bits, or floats."""

    def notes(self, rules: ImageRules) -> list[str]:
        """Return one line for people about each kind of image that was found."""
        applied, dropped = rules.exif == "apply", rules.alpha == "drop"
        findings = (
            (
                self.rotated,
                "have an EXIF orientation, which --exif apply turns upright"
                if applied
                else "have an EXIF orientation, which is ignored; --exif apply turns them upright",
            ),
            (
                self.transparent,
                "have transparency, which is dropped; --alpha white or --alpha black lays them "
                "over that colour"
                if dropped
                else f"have transparency and are laid over {rules.alpha}",
            ),
            (
                self.deep,
                "have 16-bit or float pixels, which are scaled to 8 bits; see docs/data.md",
            ),
        )
        return [
            f"{count:,} of {self.sampled:,} sampled images {text}"
            for count, text in findings
            if count
        ]


def survey(store: Store) -> Survey:
    """Read the headers of a sample of a store's images, without those that cannot be read."""
    heads = _headers(store, sample_of(store, np.arange(len(store))))
    flags = np.array([head.flags for head in heads], np.int64)

    def count(flag: Flags) -> int:
        return int(np.count_nonzero(flags & flag))

    return Survey(len(heads), count(Flags.ROTATED), count(Flags.TRANSPARENT), count(Flags.DEEP))


def decoded_bytes(store: Store, chosen: NDArray[np.int64] | None = None) -> tuple[int, bool]:
    """Return how many bytes the decoded images take, and whether that is known exactly.

    By the sizes that the store knows; else by the headers of all images, if they are few, or of a
    sample, with a margin. Images that cannot be read count nothing: 0 if that is true of all.

    Args:
        store: the images.
        chosen: positions of those that are wanted; all by default.
    """
    wanted = np.arange(len(store)) if chosen is None else chosen
    if (known := store.dimensions()) is not None:
        return 3 * int(known[wanted].prod(1).sum()), True
    sample = sample_of(store, wanted)
    found = [3 * head.height * head.width for head in _headers(store, sample)]
    if not found or len(sample) == len(wanted):
        return sum(found), True
    return int(len(wanted) * np.mean(found) * _MARGIN), False


def sample_of(store: Store, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose images from all over a data set, or from few pieces that are read as a whole.

    Args:
        store: the images.
        wanted: positions of the images to choose from.
    """
    most = _REMOTE_SAMPLE if store.is_remote else _SAMPLE
    if len(wanted) <= most:
        return wanted
    if store.groups is None:
        return wanted[_evenly(len(wanted), most)]
    groups = store.groups[wanted]
    known = np.unique(groups)
    few = known[_evenly(len(known), _SAMPLE_GROUPS)]
    return np.concatenate([wanted[groups == group][: most // _SAMPLE_GROUPS] for group in few])


def _headers(store: Store, sample: NDArray[np.int64]) -> list[Probe]:
    """Read the headers of images, without those that cannot be read."""
    store.ahead(sample.tolist())
    heads = []
    for index in sample.tolist():
        with contextlib.suppress(DataError):
            heads.append(store.header(index, store.read(index)))
    return heads


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))
