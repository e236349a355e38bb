"""Names of splits, and the choice of a split's files by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from fastsiam.console import format_count
from fastsiam.errors import NoSplitError

from ..remote.path import Place
from .base import warn_once

Split = Literal["train", "val"]

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
}
"""Folder and file names of each split; the first one that exists is used."""
ALL_SPLIT_NAMES = (*SPLIT_NAMES["train"], *SPLIT_NAMES["val"])


def choose_split(split: Split, files: Sequence[Place], folder: Place) -> list[Place]:
    """Select a split's files: those with the split in their name, or else in a folder named for it.

    That folder must be below ``folder``. If no file name contains any split's name, all
    files are training files.

    Raises:
        NoSplitError: no file belongs to the split.
    """

    def parent(path: Place) -> str:
        if path.parent == folder:
            return ""
        return path.parent.name.lower().removesuffix(".parquet")  # Spark writes such folders

    has_split = {path: not words(path.stem).isdisjoint(ALL_SPLIT_NAMES) for path in files}
    others = [p for p in files if not has_split[p] and parent(p) not in ALL_SPLIT_NAMES]
    for name in SPLIT_NAMES[split]:
        matches = [path for path in files if name in words(path.stem)]
        matches = matches or [path for path in files if parent(path) == name]
        if matches:
            if split == "train" and others:
                warn_once(
                    f"{folder} has {format_count(len(others), 'file')} of no split, such as "
                    f"{others[0].name}, which are not used; to train on them too, pass them with "
                    "another --data"
                )
            return matches
    if split == "train" and not any(has_split.values()):
        return list(files)
    raise NoSplitError(f"{folder} has no file of this kind with {split!r} in its name")


def find_split(path: Place, split: Split) -> list[Place]:
    """Return the files of a split, given the path of the training file.

    For "train" that is the path itself. For "val" it is the matching files in the same folder: for
    ``cats-train.tar``, ``cats-val.tar`` but not ``dogs-val.tar``.

    Raises:
        NoSplitError: no such file exists, or the given file's name does not contain "train".
    """
    if split == "train":
        return [path]
    if "train" not in path.stem.lower():
        raise NoSplitError(f"{path} has no {split} split beside it")

    def words_before_split(file: Place) -> list[str]:
        before = re.split("train|val|test", file.stem.lower(), maxsplit=1)[0]
        return re.findall("[a-z0-9]+", before)

    siblings = list_visible(path.parent, path.suffix)
    prefix = words_before_split(path)
    return choose_split(
        split, [file for file in siblings if words_before_split(file) == prefix], path.parent
    )


def words(name: str) -> set[str]:
    """Return the words of a name, lower-case: train and faces of faces-train-00012."""
    return {*re.split(r"[^a-z]+", name.lower())}


def list_visible(folder: Place, ending: str) -> list[Place]:
    """Return the visible files of a folder whose names end with ``ending``, sorted."""
    return sorted(path for path in folder.glob(f"[!.]*{ending}") if path.is_file())
