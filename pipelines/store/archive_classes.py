"""The class of each image of a set of tars, by its name, and the order of the images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .index import Index, pack_texts
from .labels import number_classes
from .probe import Flags


def arrange(rows: NDArray[np.void], names: list[str], texts: list[str], source: str) -> Index:
    """Give every image its class, and put the images in the order that a folder of them has.

    Args:
        rows: (images,) of type ROW, without labels.
        names: (images,) path of each image within its tar.
        texts: (images,) content of the .cls file beside each image; "" without one.
        source: the tars, for messages.

    Returns:
        An index of the rows, ``names``, ``classes``, and ``split``: whether folders train/ and val/
        tell the splits, in which case ``Flags.HELD_OUT`` marks the second.

    Raises:
        DataError: there are no images, or some have a class and others have none.
    """
    if not names:
        raise DataError(f"{source} holds no images")
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
        paths, texts, rows = [paths[i] for i in kept], [texts[i] for i in kept], rows[kept]
        marks = [int(Flags.HELD_OUT) if parts[shared] == held_out else 0 for parts in paths]
        rows["flags"] |= np.array(marks, np.uint16)
        shared += 1
    of_webdataset = any(texts)
    if of_webdataset:
        _check_class_files(paths, texts, source)
    else:
        texts = _classes_of_folders(paths, shared, source)
    if of_webdataset and all(text.isascii() and text.isdigit() for text in texts):
        # as shards of ImageNet have them
        numbers = np.array([int(text[:18]) for text in texts])
        rows["label"], classes = number_classes(numbers, source)
    else:
        rows["label"], classes = number_classes([text or None for text in texts], source)
    names = ["/".join(parts[shared:]) for parts in paths]
    order = sorted(range(len(names)), key=[_files_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(rows["label"][order], kind="stable")]
    return Index(
        {
            "rows": rows[order],
            "names": pack_texts([names[i] for i in order]),
            "classes": pack_texts(classes),
            "split": np.array(split),
        }
    )


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


def _check_class_files(paths: list[list[str]], texts: list[str], source: str) -> None:
    """Raise a ``DataError`` if an image has no class file though others have one."""
    if not all(texts):
        bare = "/".join(paths[texts.index("")])
        raise DataError(f"{source}: {bare} has no .cls file beside it, though others have one")


def _classes_of_folders(paths: list[list[str]], shared: int, source: str) -> list[str]:
    """Return each image's class: the first folder below the shared ones; "" if none has one."""
    own = [parts[shared] if len(parts) > shared + 1 else "" for parts in paths]
    if any(own) and not all(own):
        raise DataError(
            f"{source} holds images both by themselves ({paths[own.index('')][-1]}) and in "
            f"folders ({min(filter(None, own))}/)"
        )
    return own


def _files_first(name: str) -> str:
    """Return a key that sorts as a folder is listed: its files, and then what lies deeper."""
    folder, _, own = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + own
