"""Finds what is to be converted, in whatever form it lies there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from fastsiam.errors import DataError, NoSplitError

from ..store import Split, Store, open_store
from .parquet import ParquetStore, parquet_files

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


def open_sources(kind: Kind, root: Path) -> dict[Split, Store]:
    """Open a data set in any of its forms.

    Args:
        kind: which data set, or which form.
        root: where to look.

    Returns:
        The splits that are there; "train" always is.

    Raises:
        DataError: it is not there; says what was looked for, where, and how to get it.
    """
    if not root.exists():
        raise DataError(f"no data at {root}: name them with --source or $FASTSIAM_DATA")
    if kind == "parquet":
        return _splits(partial(_open_parquet, root))
    if kind == "folder" or root.is_file():
        return _splits(partial(open_store, root, sources=True))
    if kind == "imagenet":
        return _imagenet(root)
    return _cifar10(root)


def _splits(open_split: Callable[[Split], Store]) -> dict[Split, Store]:
    found: dict[Split, Store] = {"train": open_split("train")}
    with contextlib.suppress(NoSplitError):
        found["val"] = open_split("val")
    return found


def _open_parquet(root: Path, split: Split) -> Store:
    return ParquetStore(root, parquet_files(root, split))


def _imagenet(root: Path) -> dict[Split, Store]:
    for folder in (root / place for place in _IMAGENET_PLACES):
        classes = _names(folder / "train") or _names(folder)
        if any(folder.glob("*train*.tar")) or any(map(_WNID.fullmatch, classes)):
            return _splits(partial(open_store, folder, sources=True))
        for place in (folder, folder / "data"):
            if any(place.glob("train*.parquet")):
                return _splits(partial(_open_parquet, place))
    raise DataError(_not_found(_IMAGENET_HELP, root, _IMAGENET_PLACES))


def _cifar10(root: Path) -> dict[Split, Store]:
    for folder in (root / place for place in _CIFAR_PLACES):
        archive = folder / "cifar-10-python.tar.gz"
        if archive.is_file():
            return _splits(partial(open_store, archive))
        if "airplane" in _names(folder / "train"):
            return _splits(partial(open_store, folder, sources=True))
    raise DataError(_not_found(_CIFAR_HELP, root, _CIFAR_PLACES))


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _not_found(text: str, root: Path, places: Iterable[str]) -> str:
    return text.format(root=root, places=", ".join(f"{place}/" for place in places if place))
