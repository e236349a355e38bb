"""Conversion of labels to class numbers, and ImageNet's validation labels from their list."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoLabelsError
from fastsiam.files import os_errors_as

from ..remote.path import Place
from .base import Store, warn_once

LABELS = ("label", "labels", "fine_label", "cls")
"""Names of label columns; the first one that a table or list has is used."""
_MOST_CLASSES = 10**6
_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_DEVKIT = "ILSVRC2012_devkit_t12"
_KAGGLE_LIST = "LOC_val_solution.csv"


def parse_labels(texts: Sequence[str]) -> NDArray[np.int64] | list[str | None]:
    """Parse label texts: an array of class numbers if all are integers, else a list of class names.

    An empty text means no label: -1 or None.
    """
    if all(re.fullmatch(r"(-?[0-9]{1,18})?", text) for text in set(texts)):
        return np.array([int(text or -1) for text in texts], np.int64)
    return [text or None for text in texts]


def number_classes(
    labels: NDArray[np.int64] | Sequence[str | None], source: object, classes: tuple[str, ...] = ()
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Convert labels to class numbers.

    Args:
        labels: (images,) class numbers, negative for unlabelled images; or class names, None for
            unlabelled images.
        source: description of the data, for messages.
        classes: class names, indexed by number, if known. If they lack a name in ``labels``, all
            names in ``labels`` are numbered in sorted order. If they are empty and ``labels`` are
            numbers, the class names are "0", "1", ...

    Returns:
        (images,) class numbers, -1 for unlabelled images; and the class names. If a number is too
        high for a class, such as an index of the images, all images are unlabelled, with a warning.

    Raises:
        DataError: a class number has no name.
    """
    if not isinstance(labels, np.ndarray):
        names = {name for name in labels if name is not None}
        if not names <= {*classes}:
            classes = tuple(sorted(names))
        number: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
        return np.array([number.get(name, -1) for name in labels], np.int64), classes
    numbers = np.maximum(labels, -1)
    most = int(numbers.max(initial=-1))
    if most >= _MOST_CLASSES:
        warn_once(f"the images in {source} are unlabelled: the label {most} is not a class number")
        return np.full(len(labels), -1), ()
    classes = classes or tuple(str(i) for i in range(most + 1))
    if most >= len(classes):
        raise DataError(f"{source} has labels without a class name")
    return numbers, classes


def validation_wnids(store: Store) -> list[str]:
    """Return the WordNet id of each of ImageNet's validation images; [] for another data set.

    The devkit's or Kaggle's list of them is searched next to the images and in up to four parent
    folders.

    Raises:
        NoLabelsError: no list was found.
        DataError: the list cannot be read, or does not contain an image.
    """
    matches = [_VALIDATION_NAME.search(store.name(i)) for i in range(len(store))]
    if not all(matches):
        return []
    wnids = _known_labels(store.root)
    try:
        return [wnids[int(match[1])] for match in matches if match]
    except KeyError as error:
        raise DataError(f"the list of labels lacks validation image {error}") from error


def _known_labels(root: Place) -> dict[int, str]:
    """Return the WordNet id of each validation image, by its number from 1 to 50,000."""
    # of a remote path only the nearest, because each folder costs requests
    parents = root.resolve().parents[:4] if isinstance(root, Path) else [root.parent]
    for folder in (root, *parents):
        for name, read in ((f"{_DEVKIT}.tar.gz", _from_devkit), (_KAGGLE_LIST, _from_kaggle)):
            if (folder / name).is_file():
                return read(folder / name)
    raise NoLabelsError(
        f"{root} has ImageNet's validation images without their labels: put {_DEVKIT}.tar.gz or "
        f"{_KAGGLE_LIST} beside them"
    )


def _from_devkit(path: Place) -> dict[int, str]:
    """Return the WordNet ids from the devkit's class numbers and its table of classes."""
    from scipy.io import loadmat

    try:
        content = gzip.decompress(path.read_bytes())  # checks all of it: scipy can crash on damage
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:

            def read(name: str) -> bytes:
                file = tar.extractfile(f"{_DEVKIT}/data/{name}")
                return file.read() if file else b""

            table = loadmat(io.BytesIO(read("meta.mat")), squeeze_me=True)["synsets"]
            wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
            numbers = read("ILSVRC2012_validation_ground_truth.txt").split()
            return {i: wnids[int(number)] for i, number in enumerate(numbers, 1)}
    except Exception as error:  # scipy and tarfile can raise any exception on a corrupt file
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error


def _from_kaggle(path: Place) -> dict[int, str]:
    """Return the WordNet ids from Kaggle's list, with lines of image name, WordNet id and boxes."""
    with os_errors_as(DataError, f"cannot read the list of labels {path}"):
        text = path.read_bytes().decode(errors="replace")
    pairs = re.findall(r"^ILSVRC2012_val_(\d{8}),(n\d{8})\b", text, re.MULTILINE)
    return {int(number): wnid for number, wnid in pairs}
