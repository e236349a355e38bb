"""The class of each image of a set of tars, by its name, and the order of the images."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .archive_index import ROW, Index
from .base import numbered_classes
from .probe import Flags


def webdataset_key(file: int, name: str) -> str:
    """Return what the files of one WebDataset sample share: tar, folder, name up to its first dot.

    Args:
        file: number of the tar.
        name: of a member.
    """
    folder, _, own = name.rpartition("/")
    return f"{file}/{folder}/{own.split('.', 1)[0]}"


def arranged(names: list[str], rows: NDArray[np.void], texts: dict[str, str], source: str) -> Index:
    """Give every image its class, and put the images in the order that a folder of them has.

    Args:
        names: (images,) path of each image within its tar.
        rows: (images,) of type ROW, without labels.
        texts: content of WebDataset's .cls files, by ``webdataset_key``; none in other tars.
        source: the tars, for messages.

    Raises:
        DataError: there are no images, or some have a class and others have none.
    """
    if not names:
        raise DataError(f"{source} holds no images")
    assert rows.dtype == ROW
    paths = [name.split("/") for name in names]
    shared = _shared_parents(paths)
    tops = {parts[shared] for parts in paths if len(parts) > shared + 1}
    split = "train" in tops and len(tops) > 1
    if split:  # as in a folder: train/ and val/ (or test/), and nothing else
        held_out = "val" if "val" in tops else "test"
        kept = [
            i
            for i, parts in enumerate(paths)
            if len(parts) > shared + 1 and parts[shared] in ("train", held_out)
        ]
        names, paths, rows = [names[i] for i in kept], [paths[i] for i in kept], rows[kept]
        marks = [int(Flags.HELD_OUT) if parts[shared] == held_out else 0 for parts in paths]
        rows["flags"] |= np.array(marks, np.uint16)
        shared += 1
    if texts:
        own = _classes_beside(names, rows["file"], texts, source)
    else:
        own = _classes_of_folders(paths, shared, source)
    classes, rows["label"] = _numbered(own, bare=bool(texts), source=source)
    return _sorted(rows, classes, split, ["/".join(parts[shared:]) for parts in paths])


def _shared_parents(paths: list[list[str]]) -> int:
    """Count the leading folders that all images share, the last level of folders left out."""
    first = paths[0][:-1]
    deepest = 0
    for parts in paths:
        folders = parts[:-1]
        deepest = max(deepest, len(folders))
        while folders[: len(first)] != first:
            first.pop()
    return max(0, min(len(first), deepest - 1))


def _classes_beside(
    names: list[str], files: NDArray[np.uint16], texts: dict[str, str], source: str
) -> list[str]:
    """Return each image's class: the text of the .cls file beside it."""
    own = [
        texts.get(webdataset_key(int(file), name), "")
        for name, file in zip(names, files, strict=True)
    ]
    if not all(own):
        bare = names[own.index("")]
        raise DataError(f"{source}: {bare} has no .cls file beside it, though others have one")
    return own


def _classes_of_folders(paths: list[list[str]], shared: int, source: str) -> list[str]:
    """Return each image's class: the first folder below the shared ones; "" if none has one."""
    own = [parts[shared] if len(parts) > shared + 1 else "" for parts in paths]
    if any(own) and not all(own):
        raise DataError(
            f"{source} holds images both by themselves ({paths[own.index('')][-1]}) and in "
            f"folders ({min(filter(None, own))}/)"
        )
    return own


def _numbered(
    own: list[str], *, bare: bool, source: str
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the names of all classes, and each image's position among them, -1 without a class.

    Args:
        own: (images,) class of each image.
        bare: take classes for the labels themselves if all are numbers, as shards of ImageNet
            have them.
        source: the tars, for messages.
    """
    if bare and all(name.isascii() and name.isdigit() for name in own):
        labels = np.array([int(name[:18]) for name in own], np.int64)
        return numbered_classes(labels, source), labels
    classes = tuple(sorted(set(own) - {""}))
    place = {name: label for label, name in enumerate(classes)}
    return classes, np.array([place.get(name, -1) for name in own], np.int64)


def _sorted(
    rows: NDArray[np.void], classes: tuple[str, ...], split: bool, names: list[str]
) -> Index:
    """Sort the images by class, and within a class as a folder is listed."""
    order = sorted(range(len(names)), key=[_files_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(rows["label"][order], kind="stable")]
    joined = "\0".join(names[i].replace("\0", "_") for i in order)
    packed = zlib.compress(joined.encode("utf-8", "surrogateescape"), 1)
    return Index(rows[order], classes, split, packed)


def _files_first(name: str) -> str:
    """Return a key that sorts as a folder is listed: its files, and then what lies deeper."""
    folder, _, own = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + own
