"""Image files that a list names: a .csv or .parquet file with a column of paths."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import reason

from .base import SPLIT_NAMES, Split
from .columns import LABELS, PATH, label_of, path_column, read_labels, reading
from .folder import STAT_THREADS, FileStore
from .labels import number_classes

CSV = ".csv"
_SPLIT = "split"
_Rows = tuple[Sequence[str | None], NDArray[np.int64], tuple[str, ...], Sequence[str] | None]
"""Paths, labels (-1 for none) and classes of a list's rows; the split of each, if it tells it."""
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LOOKED_FOR = 4096
"""Files of a list that are looked for when it is opened; of a longer list, evenly spread ones."""


class ListedStore(FileStore):
    """Image files that a list names, in its order; one may be named several times.

    Paths are relative to the list's folder, or absolute. Labels are integers or names of classes.
    A column ``split`` tells which rows are training images; without it, all are.

    Args:
        path: the list, .csv or .parquet.
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
        read = _read_csv if path.suffix.lower() == CSV else _read_parquet
        paths, labels, classes, splits = read(path, names)
        if not paths:
            raise DataError(f"{path} names no images: it has no rows")
        taken = _of_split(path, len(paths), splits, split)
        files = []
        for row in taken.tolist():
            name = paths[row]
            if not name or "\0" in name:
                raise DataError(f"{path} has no path in row {row + 1:,}: remove the row")
            files.append(os.fsencode(name))
        super().__init__(path, path.parent, files, labels[taken], classes)
        self._check_files()

    def _check_files(self) -> None:
        """Raise a ``DataError`` if files are not there; of a long list look for some."""
        some = np.unique(np.linspace(0, len(self) - 1, min(len(self), _LOOKED_FOR), dtype=int))
        with ThreadPoolExecutor(STAT_THREADS) as pool:
            there = list(pool.map(os.path.isfile, map(self._file, some.tolist())))
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


def _read_csv(path: Path, names: ColumnNames) -> _Rows:
    """Read a list that is a CSV file in UTF-8 whose first line names the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            paths = names.image or PATH
            label = names.label or next((name for name in LABELS if name in header), "")
            _check_header(path, header, paths, names.label)
            places = {name: header.index(name) for name in (paths, label, _SPLIT) if name in header}
            columns: dict[str, list[str]] = {name: [] for name in places}
            for line in lines:
                if len(line) == len(header):
                    for name, place in places.items():
                        columns[name].append(line[place])
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
    texts = columns.get(label, [""] * len(columns[paths]))
    if all(map(_WHOLE_NUMBER.fullmatch, set(texts) - {""})):
        labels = number_classes(np.array([int(text or -1) for text in texts], np.int64), path)
    else:
        labels = number_classes([text or None for text in texts], path)
    return columns[paths], *labels, columns.get(_SPLIT)


def _check_header(path: Path, header: list[str], paths: str, label: str) -> None:
    """Raise a ``DataError`` if the first line of a CSV file lacks a column that is needed."""
    if len(header) == 1 and (others := [mark for mark in ";\t|" if mark in header[0]]):
        raise DataError(f"{path} has fields between {others[0]!r}: save it with commas instead")
    for name, option in ((paths, "--image-column"), (label, "--label-column")):
        if name and name not in header:
            there = f", only {', '.join(header)}" if any(header) else ""
            raise DataError(
                f"{path} has no column {name!r}{there}: name the columns in its first line, or "
                f"pass {option} NAME"
            )


def _read_parquet(path: Path, names: ColumnNames) -> _Rows:
    """Read a list that is a parquet file."""
    from pyarrow import parquet

    with reading(f"{path} is damaged"), parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        paths = path_column(schema, names.image)
        label, classes = label_of(path, schema, names.label)
        wanted = [paths, *(name for name in (label, _SPLIT) if name in schema.names)]
        table = file.read(list(dict.fromkeys(wanted)))
    labels: NDArray[np.int64] | Sequence[str | None] = np.full(len(table), -1)
    if label is not None:
        labels = read_labels([table.column(label)], path)
        if isinstance(labels, list):
            labels = [name or None for name in labels]
    splits = None
    if _SPLIT in table.column_names:
        splits = [str(name or "") for name in table.column(_SPLIT).to_pylist()]
    return table.column(paths).to_pylist(), *number_classes(labels, path, classes), splits
