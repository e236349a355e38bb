"""Labels of ImageNet's validation images, which are published in a separate list."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fastsiam.errors import DataError, NoLabelsError
from fastsiam.files import explained

from ..remote.path import Place
from .base import Store

VALIDATION_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
DEVKIT = "ILSVRC2012_devkit_t12"
KAGGLE_LIST = "LOC_val_solution.csv"


def label_validation(store: Store, train_classes: Callable[[], tuple[str, ...]]) -> None:
    """Label ImageNet's validation images by the list that its authors ship apart.

    Args:
        store: images without labels; those of other data sets stay as they are. The list lies
            beside them, or in a folder above.
        train_classes: returns the classes of the training images; may be empty.

    Raises:
        NoLabelsError: there is no list.
        DataError: the list cannot be read, or lacks an image.
    """
    named = [VALIDATION_NAME.search(store.name(i)) for i in range(len(store))]
    if not all(named):
        return
    # on another machine, where each folder costs requests, the nearest
    above = (
        store.root.resolve().parents[:4] if isinstance(store.root, Path) else [store.root.parent]
    )
    known = _find_labels([store.root, *above])
    if known is None:
        raise NoLabelsError(
            f"{store.root} has ImageNet's validation images without their labels: put "
            f"{DEVKIT}.tar.gz or {KAGGLE_LIST} beside them"
        )
    try:
        labels = [known[int(match[1])] for match in named if match]
    except KeyError as error:
        raise DataError(f"the list of labels lacks validation image {error}") from error
    classes = train_classes()
    if not set(labels) <= set(classes):
        classes = tuple(sorted(set(labels)))
    number = {name: number for number, name in enumerate(classes)}
    store.labels = np.array([number[label] for label in labels], np.int64)
    store.classes = classes


def _find_labels(folders: Sequence[Place]) -> dict[int, str] | None:
    """Find the labels of the validation images.

    Args:
        folders: where to look for the devkit or Kaggle's list, the nearest first.

    Returns:
        From an image's number (1 to 50,000) to its WordNet id; None if no list lies there.
    """
    for folder in folders:
        if (folder / f"{DEVKIT}.tar.gz").is_file():
            return _from_devkit(folder / f"{DEVKIT}.tar.gz")
        if (folder / KAGGLE_LIST).is_file():
            return _from_kaggle(folder / KAGGLE_LIST)
    return None


def _from_devkit(path: Place) -> dict[int, str]:
    """Combine the devkit's list of class numbers with its table of classes."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading {path} takes scipy: pip install 'fastsiam[convert]'; or put {KAGGLE_LIST} "
            "beside the images"
        ) from error
    try:
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes()), mode="r:gz") as tar:

            def read(name: str) -> bytes:
                file = tar.extractfile(f"{DEVKIT}/data/{name}")
                return file.read() if file else b""

            table = loadmat(io.BytesIO(read("meta.mat")), squeeze_me=True)["synsets"]
            wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
            numbers = read("ILSVRC2012_validation_ground_truth.txt").split()
            return {i: wnids[int(number)] for i, number in enumerate(numbers, 1)}
    except (OSError, EOFError, tarfile.TarError, LookupError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error


def _from_kaggle(path: Place) -> dict[int, str]:
    """Read Kaggle's list: an image's name, a comma, its WordNet id and boxes."""
    with explained(DataError, f"cannot read the list of labels {path}"):
        lines = path.read_bytes().decode(errors="replace").splitlines()
    found = (re.match(r"ILSVRC2012_val_(\d{8}),(n\d{8})\b", line) for line in lines)
    return {int(match[1]): match[2] for match in found if match}
