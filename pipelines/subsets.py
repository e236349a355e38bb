"""Subsets of a data set: its splits, a holdout, a share of each class, or the images of a list.

Low-shot evaluation trains on 1% or 10% of ImageNet's labels. ``convert --limit`` takes a number of
images. ``--holdout 10%`` keeps a share of each class for validation. The share depends only on the
images' names and labels, so every command finds the same one. A subset is an ascending array of
positions in the data set, which ``build_loader`` and ``build_eval_loader`` take as ``chosen``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames, DataConfig
from fastsiam.config.urls import Url
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import os_errors_as
from fastsiam.views import rng

from .remote.cache import Cache
from .remote.path import open_place
from .store import MixedStore, Split, Store, open_store, select_images
from .store.base import warn_once
from .store.beton import BetonStore
from .store.decode import ImageRules
from .store.folder import ListedStore

_MAX_QUOTED = 3
"""Maximum number of list entries that a message quotes."""
_NO_MATCH, _AMBIGUOUS = -1, -2
"""Values in place of a position: no image has the name, or several images do."""


class TrainingImages(NamedTuple):
    """The open training images of a data set, with its holdout set if there is one."""

    store: Store
    training: NDArray[np.int64]
    """Positions of the images to train on, ascending."""
    holdout: NDArray[np.int64]
    """Positions of the holdout set, ascending."""

    def split(self, split: Split) -> Store:
        """Return the images to train on, or the holdout set for "val"."""
        return select_images(self.store, self.training if split == "train" else self.holdout)


def open_split(data: DataConfig, split: Split) -> Store:
    """Open the training or validation images; for a mixture, those of its first data set.

    Args:
        data: the images, and the share of the training images to hold out, if any.
        split: "train", without the holdout set if there is one, or "val".

    Raises:
        NoSplitError: the data set lacks the split, and ``data.holdout`` is not set.
        DataError: see ``open_with_holdout``.
        ValueError: ``split`` is neither "train" nor "val".
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be train or val, not {split!r}")
    if not data.holdout:
        return _open_images(data, split)
    return open_with_holdout(data).split(split)


def open_training(data: DataConfig) -> TrainingImages:
    """Open the training images of a data set, or of all data sets of a mixture.

    Raises:
        DataError: see ``open_with_holdout``.
    """
    parts = [open_with_holdout(part) for part in data.parts]
    if len(parts) == 1:
        return parts[0]
    store = MixedStore([store for store, _, _ in parts])
    first = np.cumsum([0, *(len(store) for store, _, _ in parts)])
    training, holdout = (
        np.concatenate([part[i] + offset for offset, part in zip(first, parts, strict=False)])
        for i in (1, 2)
    )
    return TrainingImages(store, training, holdout)


def open_with_holdout(data: DataConfig) -> TrainingImages:
    """Open all training images of one data set.

    Raises:
        DataError: the images cannot be read, or ``data.holdout`` is set although the data set has
            validation images or no class has two images.
    """
    if data.holdout and has_validation(data.root, data.columns):
        raise DataError(
            f"{data.root} already has validation images, and --holdout {data.holdout} would select "
            "others: remove --holdout, or move the validation images away"
        )
    store, holdout = _open_images(data, "train"), np.zeros(0, np.int64)
    if data.holdout:
        holdout = hold_out(store, percent=data.holdout_percent)
        if not len(holdout):
            raise DataError(
                f"--holdout {data.holdout} keeps at least one image of each class for training, "
                f"but no class of {store.root} has two: remove --holdout, or sort the images into "
                "train/ and val/ yourself"
            )
    training = np.setdiff1d(np.arange(len(store)), holdout, assume_unique=True)
    return TrainingImages(store, training, holdout)


def _open_images(data: DataConfig, split: Split) -> Store:
    cache = None
    if data.cache and isinstance(data.root, Path):
        warn_once(f"--cache has no effect on {data.root}, which is on this machine")
    elif data.cache:
        cache = Cache(Path(data.cache), data.cache_gb, is_random=not data.window)
    store = open_store(open_place(data.root, cache), split, columns=data.columns)
    if cache is not None and cache.is_too_small:
        size = sum(map(len, store.files)) / 1e9
        warn_once(
            f"--cache stores nothing: {data.data} has {size:,.1f} GB, more than --cache-gb "
            f"{data.cache_gb:g}, and a full shuffle or an evaluation reads it at random; "
            "train with --shuffle window:16384 or a larger --cache-gb"
        )
    store.set_rules(ImageRules(exif=data.exif, alpha=data.alpha))
    return store


def has_validation(root: Path | Url, columns: ColumnNames = AUTOMATIC) -> bool:
    """Return whether a data set has validation images.

    Raises:
        DataError: the data set is missing or cannot be read.
    """
    try:
        open_store(root, "val", columns=columns)
    except NoSplitError:
        return False
    return True


def choose(labels: NDArray[np.int64], *, percent: float, seed: int) -> NDArray[np.int64]:
    """Draw the same share of every class, with at least one image of each.

    Args:
        labels: (N,) class of each image of the data set, such as ``Store.labels``.
        percent: share of each class's images, above 0 and up to 100; rounded half to even.
        seed: seed of the draw.

    Returns:
        (n,) int64 positions, ascending.

    Raises:
        DataError: some images have no label.
        ValueError: ``percent`` is out of range.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
    if unlabelled := int((labels < 0).sum()):
        raise DataError(
            f"a share of every class needs labels, but {unlabelled:,} of {len(labels):,} images "
            "have none"
        )
    key = rng.keys(seed, rng.Stream.SHARE, np.arange(len(labels)))
    order, rank, count = _rank_by_class(labels, key)
    quota = np.maximum(np.rint(count * percent / 100), 1)
    return np.sort(order[rank < quota])


def sample(labels: NDArray[np.int64], *, size: int, seed: int) -> NDArray[np.int64]:
    """Draw ``size`` of N images at random, stratified by class.

    Images without a label count as one class.

    Returns:
        (size,) int64 positions, ascending; they depend only on the arguments.
    """
    key = rng.keys(seed, 0, rng.Stream.LIMIT, np.arange(len(labels)))
    order, rank, count = _rank_by_class(labels, key)
    share = (rank + 0.5) / count
    return np.sort(order[np.lexsort((key[order], share))[:size]])


def hold_out(store: Store, *, percent: float) -> NDArray[np.int64]:
    """Draw a holdout set for validation: the same share of every class, by the images' names.

    Of each class with two or more images, at least one is drawn and at least one is left. Images
    without a label count as one class. Shares are rounded half to even. The result depends only on
    the names and labels, not on the order of the images or their container. All rows of a list
    (``--data images.csv``), or of a .beton file made from it, that name the same file are drawn or
    left together, and count once.

    Returns:
        (n,) int64 positions, ascending.
    """
    digests = b"".join(
        hashlib.blake2b(store.name(i).encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for i in range(len(store))
    )
    key = rng.keys(0, 0, rng.Stream.HOLDOUT, np.frombuffer(digests, "<u8"))
    # Lists may name a file several times. Elsewhere different images may have the same name.
    images, may_repeat = np.arange(len(store)), isinstance(store, ListedStore | BetonStore)
    if may_repeat:
        _, images = np.unique(key, return_index=True)
    order, rank, count = _rank_by_class(store.labels[images], key[images])
    quota = np.minimum(np.maximum(np.rint(count * percent / 100), 1), count - 1)
    drawn = images[order[rank < quota]]
    return np.flatnonzero(np.isin(key, key[drawn])) if may_repeat else np.sort(drawn)


def _rank_by_class(
    labels: NDArray[np.int64], key: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sort images by class, and within each class by their random key.

    Returns:
        Three (N,) arrays in the sorted order: each image's position in the data set, its place
        within its class, and the number of images in its class.
    """
    order = np.lexsort((key, labels))
    _, first, count = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(first, count)
    return order, rank, np.repeat(count, count)


def read_list(store: Store, path: Path) -> NDArray[np.int64]:
    """Find the images that a text file lists, one per line.

    Args:
        store: the data set.
        path: the list. A line is an image's name within the data set (``class/file.jpg``), or only
            the file name if it is unique, as in the lists of 1% and 10% of ImageNet that SimCLR's
            authors published. Blank lines are ignored.

    Returns:
        (n,) int64 positions, ascending, without duplicates.

    Raises:
        DataError: the list cannot be read, is empty, or has names that match no image or several.
    """
    with os_errors_as(DataError, f"cannot read the list {path}"):
        text = path.read_text("utf-8-sig", "surrogateescape")
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if not lines:
        raise DataError(f"the list {path} is empty")
    names = [store.name(i) for i in range(len(store))]
    position_of: dict[str, int] = {}
    for spellings in ([name.rpartition("/")[2] for name in names], names):
        count = Counter(spellings)
        position_of |= {
            name: i if count[name] == 1 else _AMBIGUOUS for i, name in enumerate(spellings)
        }
    positions = np.array([position_of.get(line, _NO_MATCH) for line in lines])
    for kind, problem in ((_NO_MATCH, "missing from"), (_AMBIGUOUS, "ambiguous in")):
        if bad_lines := [lines[i] for i in np.flatnonzero(positions == kind)]:
            ellipsis = ", ..." if len(bad_lines) > _MAX_QUOTED else ""
            raise DataError(
                f"{len(bad_lines):,} of the {len(lines):,} images listed in {path} are {problem} "
                f"{store.root}: {', '.join(bad_lines[:_MAX_QUOTED])}{ellipsis}"
            )
    return np.unique(positions)
