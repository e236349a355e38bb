"""Training and validation images of a data set, where it has none of the latter a hold-out.

``--holdout 10%`` holds out a share of each class of the training images. Which images that are
depends on their names alone (``subsets.hold_out``): every command finds the same ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames, DataConfig
from fastsiam.errors import DataError, NoSplitError
from fastsiam.urls import Url

from .remote.cache import cached
from .store import Split, Store, open_store, picked
from .store.decode import ImageRules
from .subsets import hold_out


def open_split(data: DataConfig, split: Split) -> Store:
    """Open the training or the validation images.

    Args:
        data: where they are, and which share of the training images is held out, if any.
        split: "train", without those that are held out, or "val".

    Raises:
        NoSplitError: there is no such split, and nothing is held out.
        DataError: as ``open_whole``.
    """
    if not data.holdout:
        return _opened(data, split)
    store, held = open_whole(data)
    return picked(store, held if split == "val" else others(store, held))


def open_whole(data: DataConfig) -> tuple[Store, NDArray[np.int64]]:
    """Open all training images.

    Returns:
        The images, and the positions of those that are held out, ascending.

    Raises:
        DataError: the images cannot be read; or a share is to be held out, and there are validation
            images already or no class has two images.
    """
    if not data.holdout:
        return _opened(data, "train"), np.zeros(0, np.int64)
    if has_validation(data.root, data.columns):
        raise DataError(
            f"{data.root} has validation images of its own, and --holdout {data.holdout} would "
            "take others: leave --holdout out, or move them away"
        )
    store = _opened(data, "train")
    held = hold_out(store, percent=data.held_percent)
    if not len(held):
        raise DataError(
            f"--holdout {data.holdout} leaves at least one image of each class in training, and no "
            f"class of {store.root} has two: leave --holdout out, or sort the images into train/ "
            "and val/ yourself"
        )
    return store, held


def _opened(data: DataConfig, split: Split) -> Store:
    with cached(data):
        store = open_store(data.root, split, columns=data.columns)
    store.set_rules(ImageRules(exif=data.exif, alpha=data.alpha))
    return store


def others(store: Store, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of all other images, ascending."""
    return np.setdiff1d(np.arange(len(store)), held, assume_unique=True)


def has_validation(root: Path | Url, columns: ColumnNames = AUTOMATIC) -> bool:
    """Tell whether there are validation images at a place.

    Raises:
        DataError: there are no data, or they cannot be read.
    """
    try:
        open_store(root, "val", columns=columns)
    except NoSplitError:
        return False
    return True
