"""Finds and opens the source of a conversion, in any form that it is published in."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from fastsiam.config import ColumnNames
from fastsiam.config.urls import Url
from fastsiam.errors import DataError, NoLabelsError, NoSplitError
from fastsiam.files import explained

from ..remote.path import Place, opened
from ..store import Split, Store, open_parquet, open_store

Kind = Literal["imagenet", "cifar10", "folder", "parquet"]

_WNID = re.compile(r"n\d{8}(\.tar)?")
_IMAGENET_PLACES = ("", "imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "imagenet-1k")
_CIFAR_PLACES = ("", "cifar10", "cifar-10")
_IMAGENET_HELP = """no ImageNet found in {root}, nor in {places} below it. Looked for:
  ILSVRC2012_img_train.tar, and ILSVRC2012_img_val.tar with ILSVRC2012_devkit_t12.tar.gz:
      the official archives, from https://image-net.org/download-images (after registering)
  train/n01440764/*.JPEG and val/n01440764/*.JPEG (or n01440764.tar):
      the archives unpacked, or Kaggle's imagenet-object-localization-challenge
  *train*.tar: WebDataset shards, such as huggingface.co/datasets/timm/imagenet-1k-wds
  train-*.parquet: huggingface-cli download ILSVRC/imagenet-1k --repo-type dataset --local-dir DIR
Name another place with --source or $FASTSIAM_DATA."""
_CIFAR_HELP = """no CIFAR-10 found in {root}, nor in {places} below it. Looked for:
  cifar-10-python.tar.gz: from https://www.cs.toronto.edu/~kriz/cifar.html
  train/airplane/* and test/airplane/*: its images as files
Name another place with --source or $FASTSIAM_DATA."""


def open_sources(
    kind: Kind, where: Path | Url, columns: ColumnNames, say: Callable[[str], None]
) -> tuple[Place, dict[Split, Store]]:
    """Open a data set in any of its forms.

    Args:
        kind: which data set, or which form.
        where: where to look.
        columns: those of a table that hold images and labels, where the user named them.
        say: for messages.

    Returns:
        The file or folder that holds it, and its splits that are there; "train" always is.

    Raises:
        DataError: it is not there; says what was looked for, where, and how to get it.
    """
    with explained(DataError, f"cannot look for the data in {where}"):
        place, open_split = _found(kind, opened(where), columns)
        splits: dict[Split, Store] = {"train": open_split("train")}
        try:
            splits["val"] = open_split("val")
        except NoLabelsError as error:
            say(f"no val.beton: {error}")
        except NoSplitError:
            pass
    return place, splits


def _found(kind: Kind, root: Place, columns: ColumnNames) -> tuple[Place, Callable[[Split], Store]]:
    """Look for the data set in each place where it may lie; return it and what opens its splits."""
    if not root.exists():
        raise DataError(f"no data at {root}: name them with --source or $FASTSIAM_DATA")
    if kind == "parquet":
        return root, partial(open_parquet, root, names=columns, in_order=True)
    if kind == "folder" or root.is_file():
        return root, partial(open_store, root, sources=True, columns=columns)
    find, places, text = (
        (_imagenet, _IMAGENET_PLACES, _IMAGENET_HELP)
        if kind == "imagenet"
        else (_cifar10, _CIFAR_PLACES, _CIFAR_HELP)
    )
    for place in places:
        if (open_split := find(root / place, columns)) is not None:
            return root / place.partition("/")[0], open_split
    below = ", ".join(f"{place}/" for place in places if place)
    raise DataError(text.format(root=root, places=below))


def _imagenet(folder: Place, columns: ColumnNames) -> Callable[[Split], Store] | None:
    """Return what opens the splits of an ImageNet in this folder, if there is one."""
    classes = _names(folder / "train") or _names(folder)
    if any(folder.glob("*train*.tar")) or any(map(_WNID.fullmatch, classes)):
        return partial(open_store, folder, sources=True, columns=columns)
    for place in (folder, folder / "data"):
        if any(place.glob("train*.parquet")):
            return partial(open_parquet, place, names=columns, in_order=True)
    return None


def _cifar10(folder: Place, columns: ColumnNames) -> Callable[[Split], Store] | None:
    """Return what opens the splits of a CIFAR-10 in this folder, if there is one."""
    archive = folder / "cifar-10-python.tar.gz"
    if archive.is_file():
        return partial(open_store, archive, columns=columns)
    if "airplane" in _names(folder / "train"):
        return partial(open_store, folder, sources=True, columns=columns)
    return None


def _names(folder: Place) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
