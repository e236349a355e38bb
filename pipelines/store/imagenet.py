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
_WNID = re.compile(r"n\d{8}")
DEVKIT = "ILSVRC2012_devkit_t12"
LISTS = (
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "val.txt",
    "ILSVRC2012_validation_ground_truth.txt",
)
"""Kaggle's, TensorFlow's and Caffe's lists, and the devkit's own (which needs the rest of it)."""


def label_validation(store: Store, train_classes: Callable[[], tuple[str, ...]]) -> None:
    """Label ImageNet's validation images by the list that its authors ship apart.

    Args:
        store: images without labels; those of other data sets stay as they are. The list lies
            beside them, or in a folder above.
        train_classes: returns the classes of the training images; may be empty.

    Raises:
        NoLabelsError: there is no list.
        DataError: the list cannot be read, lacks an image, or counts to more classes than the
            training images have.
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
            f"ILSVRC2012_devkit_t12.tar.gz or one of {', '.join(LISTS[:3])} beside them"
        )
    try:
        labels = [known[int(match[1])] for match in named if match]
    except KeyError as error:
        raise DataError(f"the list of labels lacks validation image {error}") from error
    classes = train_classes()
    if all(isinstance(label, str) for label in labels):
        if not set(labels) <= set(classes):
            classes = tuple(sorted(set(map(str, labels))))
        number = {name: number for number, name in enumerate(classes)}
        labels = [number[str(label)] for label in labels]
    store.labels = np.array(labels, np.int64)
    if store.labels.max() >= len(classes):
        raise DataError(
            f"the list of labels counts to {store.labels.max()}, "
            f"but the training images have {len(classes)} classes"
        )
    store.classes = classes


def _find_labels(folders: Sequence[Place]) -> dict[int, str | int] | None:
    """Find the labels of the validation images.

    Args:
        folders: where to look for the devkit or a list, the nearest first.

    Returns:
        From an image's number (1 to 50,000) to its WordNet id, or to its class's place among the
        sorted WordNet ids; None if no list lies there.
    """
    for level, folder in enumerate(folders):
        archive, unpacked = folder / f"{DEVKIT}.tar.gz", folder / DEVKIT / "data"
        if archive.is_file():
            return _from_devkit(archive)
        if unpacked.is_dir():
            return _from_devkit(unpacked)
        for name in LISTS:
            if level > 2 and name == "val.txt":
                continue  # anybody's, so far away
            if (folder / name).is_file():
                return _from_list(folder / name)
    return None


def _read_devkit(path: Place, name: str) -> bytes:
    """Read a file of the devkit, which is unpacked or an archive."""
    if path.name == "data":
        return (path / name).read_bytes()
    try:
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes()), mode="r:gz") as tar:
            file = tar.extractfile(f"{DEVKIT}/data/{name}")
            assert file is not None
            return file.read()
    except (KeyError, OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error


def _from_devkit(path: Place) -> dict[int, str | int]:
    """Combine the devkit's list of class numbers with its table of classes."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading {path} takes scipy: pip install 'fastsiam[convert]'; "
            f"or put one of these lists beside the images: {', '.join(LISTS[:3])}"
        ) from error
    try:
        table = loadmat(io.BytesIO(_read_devkit(path, "meta.mat")), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
        numbers = _read_devkit(path, "ILSVRC2012_validation_ground_truth.txt").split()
        return {i: wnids[int(number)] for i, number in enumerate(numbers, 1)}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is no devkit of ILSVRC 2012 ({error})") from error


def _from_list(path: Place) -> dict[int, str | int]:
    """Read a plain list: one label a line, with or without the image's name before it."""
    if path.name == LISTS[3]:
        raise DataError(
            f"{path} numbers the classes as the devkit does: put {DEVKIT}.tar.gz beside the images"
        )
    with explained(DataError, f"cannot read the list of labels {path}"):
        lines = path.read_bytes().decode(errors="replace").splitlines()
    labels: dict[int, str | int] = {}
    for line in lines:
        words = line.replace(",", " ").split()
        if not words or words[0] == "ImageId":
            continue
        named = VALIDATION_NAME.fullmatch(words[0].removesuffix(".JPEG") + ".JPEG")
        number = int(named[1]) if named else len(labels) + 1
        label = words[1] if named and len(words) > 1 else words[0]
        if _WNID.fullmatch(label):
            labels[number] = label
        elif label.isascii() and label.isdigit():
            labels[number] = int(label)
        else:
            raise DataError(f"{path} has a line that is no label: {line[:80]!r}")
    return labels
