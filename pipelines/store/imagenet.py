"""Labels of ImageNet's validation images, which lie in a list of their own."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastsiam.errors import DataError

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


def validation_labels(folders: list[Path]) -> dict[int, str | int] | None:
    """Find the labels of the validation images.

    Args:
        folders: where to look for the devkit or a list, the nearest first.

    Returns:
        From an image's number (1 to 50,000) to its WordNet id, or to its class's place among the
        sorted WordNet ids; None if no list lies there.

    Raises:
        DataError: a list is there and cannot be read.
    """
    for level, folder in enumerate(folders):
        archive, unpacked = folder / f"{DEVKIT}.tar.gz", folder / DEVKIT / "data"
        if archive.is_file():
            return _from_devkit(archive, partial(_member, archive))
        if unpacked.is_dir():
            return _from_devkit(unpacked, partial(_file, unpacked))
        for name in LISTS:
            if level > 2 and name == "val.txt":
                continue  # anybody's, so far away
            if (folder / name).is_file():
                return _from_list(folder / name)
    return None


def _file(folder: Path, name: str) -> bytes:
    return (folder / name).read_bytes()


def _member(archive: Path, name: str) -> bytes:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            file = tar.extractfile(f"{DEVKIT}/data/{name}")
            assert file is not None
            return file.read()
    except (KeyError, OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be read ({error}); fetch it again") from error


def _from_devkit(path: Path, read: Callable[[str], bytes]) -> dict[int, str | int]:
    """Combine the devkit's list of class numbers with its table of classes."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading {path} takes scipy: pip install 'fastsiam[convert]'; "
            f"or put one of these lists beside the images: {', '.join(LISTS[:3])}"
        ) from error
    try:
        table = loadmat(io.BytesIO(read("meta.mat")), squeeze_me=True)["synsets"]
        wnids = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in table}
        numbers = read("ILSVRC2012_validation_ground_truth.txt").split()
        return {i: wnids[int(number)] for i, number in enumerate(numbers, 1)}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is no devkit of ILSVRC 2012 ({error})") from error


def _from_list(path: Path) -> dict[int, str | int]:
    """Read a plain list: one label a line, with or without the image's name before it."""
    if path.name == LISTS[3]:
        raise DataError(
            f"{path} numbers the classes as the devkit does: put {DEVKIT}.tar.gz beside the images"
        )
    labels: dict[int, str | int] = {}
    for line in path.read_text(errors="replace").splitlines():
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
