"""Image files that a list names: a .csv file with a column of paths."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import reason

from .base import SPLIT_NAMES, Split
from .columns import LABELS
from .folder import FileStore
from .labels import number_classes

CSV = ".csv"
_PATH, _SPLIT = "path", "split"
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LOOKED_FOR = 1000
"""Files of a list that are looked for when it is opened; of a longer list, evenly spread ones."""


class ListedStore(FileStore):
    """Image files that a list names, in its order; one may be named several times.

    Paths are relative to the list's folder, or absolute. Labels are integers or names of classes.
    A column ``split`` tells which rows are training images; without it, all are.

    Args:
        path: the list.
        split: rows to take.
        names: columns that the user named; ``image`` is the one of the paths.

    Raises:
        NoSplitError: no row is of the split.
        DataError: the list cannot be read, has no column of paths or no rows, or names files that
            are not there; of a long list only some files are looked for.
    """

    kind = "files of a list"
    repair = "repair the file or remove its row"

    def __init__(self, path: Path, split: Split, names: ColumnNames = AUTOMATIC) -> None:
        columns = _read_csv(path, names)
        paths, splits = columns[names.image or _PATH], columns.get(_SPLIT)
        if not paths:
            raise DataError(f"{path} names no images: it has no rows")
        taken = _of_split(path, len(paths), splits, split)
        files = []
        for row in taken.tolist():
            name = paths[row]
            if not name or "\0" in name:
                raise DataError(f"{path} has no path in row {row + 1:,}: remove the row")
            files.append(os.fsencode(name))
        labels, classes = _read_labels(columns, names, path)
        super().__init__(path, path.parent, files, labels[taken], classes)
        self._check_files()

    def _check_files(self) -> None:
        """Raise a ``DataError`` if files are not there; of a long list look for some."""
        some = np.unique(np.linspace(0, len(self) - 1, min(len(self), _LOOKED_FOR), dtype=int))
        there = [os.path.isfile(self._file(index)) for index in some.tolist()]
        if all(there):
            return
        gone = f"{there.count(False):,} of {len(some):,} files"
        looked_for = " that were looked for" if len(some) < len(self) else ""
        raise DataError(
            f"{self.root} names files that are not there: {gone}{looked_for}, the first "
            f"{self.path(int(some[there.index(False)]))}; relative paths begin at the list's folder"
        )


def _of_split(
    path: Path, rows: int, splits: Sequence[str] | None, split: Split
) -> NDArray[np.int64]:
    """Return which rows are of a split, ascending."""
    if splits is None:
        if split == "train":
            return np.arange(rows)
        raise NoSplitError(f"{path} has no validation images: it has no column {_SPLIT!r}")
    own = np.array([name.strip().lower() for name in splits])
    for name in SPLIT_NAMES[split]:
        if len(taken := np.flatnonzero(own == name)):
            return taken
    known = ", ".join(repr(str(name)) for name in np.unique(own)[:5])
    wanted = " or ".join(SPLIT_NAMES[split])
    raise NoSplitError(f"{path} has no row whose {_SPLIT} is {wanted}, only {known}")


def _read_csv(path: Path, names: ColumnNames) -> dict[str, list[str]]:
    """Read the columns of a CSV file in UTF-8 whose first line names them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            for name, option in ((names.image or _PATH, "image"), (names.label, "label")):
                if name and name not in header:
                    raise DataError(
                        f"{path} has no column {name!r}, only {', '.join(header) or 'none'}: name "
                        f"the columns in its first line, or pass --{option}-column NAME"
                    )
            rows: list[list[str]] = []
            for line in lines:
                if len(line) == len(header):
                    rows.append(line)
                elif line:
                    raise DataError(
                        f"{path} has {len(line)} fields in line {lines.line_num:,} and "
                        f"{len(header)} in its first: put quotes around a field with commas"
                    )
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8: save it in UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} is damaged in line {lines.line_num:,}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _read_labels(
    columns: dict[str, list[str]], names: ColumnNames, path: Path
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return each row's label, -1 where it has none, and the classes."""
    label = names.label or next((name for name in LABELS if name in columns), "")
    texts = columns.get(label) or [""] * len(columns[names.image or _PATH])
    if all(map(_WHOLE_NUMBER.fullmatch, set(texts) - {""})):
        return number_classes(np.array([int(text or -1) for text in texts], np.int64), path)
    return number_classes([text or None for text in texts], path)
