"""Images in parquet files, as ``datasets`` and the Hub have them: an image struct and a label.

A row group of a parquet file is decoded as a whole, so images are read in order by pyarrow, one
group at a time: that is what a conversion does. Training reads them at random, by an index of the
places of their bytes (``parquet_index``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import quoted

from ..remote import RemoteFile, RemotePath
from ..remote.file import AsFile
from ..remote.path import Place
from .base import Split, Store
from .columns import (
    Columns,
    columns_of,
    errors,
    numbered,
    path_column,
    require_pyarrow,
    short,
)
from .files import File, on_disk
from .listed import ListedStore
from .parquet_index import placed
from .probe import Bytes
from .table import Places, TableStore

PARQUET = ".parquet"
_ROWS = 64
"""Read at a time."""
_SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "test"),
}


class ParquetStore(TableStore):
    """Images of parquet files.

    Args:
        root: folder that the files lie in, for messages.
        files: the parquet files.
        names: columns that the user named.
        in_order: the images will be read in order, as a conversion does, each row group once. Else
            the places of their bytes are looked up, or found and kept.

    Raises:
        DataError: pyarrow is missing, a file cannot be read or has no image column or not the named
            one, or images are compressed and too many to be unpacked beside the files.
    """

    kind = "parquet files"

    def __init__(
        self,
        root: Place,
        files: Sequence[Place],
        names: ColumnNames = AUTOMATIC,
        *,
        in_order: bool = False,
    ) -> None:
        require_pyarrow(root)
        tables = [_open(path) for path in files]
        columns = [
            columns_of(path, table.schema_arrow, names)
            for path, table in zip(files, tables, strict=True)
        ]
        super().__init__(root, files, [table.metadata.num_rows for table in tables], columns)
        self.labels, self.classes = self._read_labels(tables)
        pieces = [
            (number, group, table.metadata.row_group(group))
            for number, table in enumerate(tables)
            for group in range(table.metadata.num_row_groups)
        ]
        counts = [facts.num_rows for _, _, facts in pieces]
        means = [facts.total_byte_size // max(1, facts.num_rows) for *_, facts in pieces]
        self._pieces = [(number, group) for number, group, _ in pieces]
        self._first, self._means = np.cumsum([0, *counts]), np.repeat(means, counts)
        self._reader = _GroupReader()
        self._places: Places | None = None
        if in_order:
            self.groups = np.repeat(np.arange(len(pieces)), counts)
        else:
            here = [path for path in files if isinstance(path, Path)]
            if len(here) < len(files):
                raise DataError(
                    f"{root} holds parquet files, whose images are read in order alone on another "
                    f"machine: convert them with fastsiam convert parquet --source {quoted(root)} "
                    "--out DIR, and name DIR or what it is uploaded to"
                )
            self._places = placed(root, here, columns)
            if len(self._places.size) != len(self.labels):
                raise DataError(f"{root} is damaged: its columns are of several lengths")
            self._refuse_paths_alone(self._places.size)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,); if read in order, its row group's mean."""
        return self._means if self._places is None else self._places.size.astype(np.int64)

    def mapped(self) -> Sequence[File]:
        """Return the files that the images' bytes lie in; pyarrow's own mappings are not there."""
        return () if self._places is None else self._places.files

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in the mapped files."""
        return None if self._places is None else self._places.locate(indices)

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        if self._places is not None:
            self._places.ahead(indices)

    def _encoded(self, index: int) -> Bytes:
        if self._places is not None:
            return self._places.read(index)
        piece = int(np.searchsorted(self._first, index, side="right")) - 1
        number, group = self._pieces[piece]
        columns, first = self._columns[number], int(self._first[piece])
        row = self._reader.row(self._paths[number], columns, group, index - first)
        return (row.get("bytes") if isinstance(row, dict) else row) or b""

    def _named_paths(self) -> list[str | None]:
        paths: list[str | None] = []
        for file, columns in zip(self._paths, self._columns, strict=True):
            table = _open(file)
            own: list[str | None] = []
            with contextlib.suppress(*errors()):  # an image column without paths
                column = table.read([f"{columns.image}.path"]).column(columns.image)
                own = [row and row["path"] for row in column.to_pylist()]
            rows = table.metadata.num_rows
            paths += own if len(own) == rows else [None] * rows
        return paths

    def _read_labels(self, tables: list[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Read the labels of all files, and the names of their classes."""
        if any(columns.label is None for columns in self._columns):
            return np.full(int(self._first_rows[-1]), -1), ()
        found = []
        for path, columns, table in zip(self._paths, self._columns, tables, strict=True):
            try:
                found.append(table.read([columns.label]).column(columns.label).combine_chunks())
            except errors() as error:
                raise DataError(
                    f"{path} is damaged in column {columns.label!r}: {short(error)}"
                ) from error
        return numbered(found, self._columns[0].classes, self.root)


class _GroupReader:
    """Reads the rows of row groups, in order, a few at a time."""

    def __init__(self) -> None:
        self._place: tuple[Place, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._rows: Any = []
        self._next = 0

    def __reduce__(self) -> tuple[type[_GroupReader], tuple[()]]:
        """Return how to make it again: at its beginning."""
        return _GroupReader, ()

    def row(self, file: Place, columns: Columns, group: int, number: int) -> Any:
        """Return a row of the image column.

        Raises:
            DataError: the group is damaged.
        """
        try:
            if self._place != (file, group) or number < self._next - len(self._rows):
                self._place = None
                self._batches = _open(file).iter_batches(
                    _ROWS, row_groups=[group], columns=[columns.image]
                )
                self._rows, self._next = [], 0
                self._place = (file, group)
            while number >= self._next:
                self._rows = next(self._batches).column(0)
                self._next += len(self._rows)
            return self._rows[number - (self._next - len(self._rows))].as_py()
        except errors() as error:
            self._place = None
            raise DataError(f"{file} is damaged in row group {group}: {short(error)}") from None


def open_parquet(
    root: Place, split: Split, names: ColumnNames = AUTOMATIC, *, in_order: bool = False
) -> Store:
    """Open a split of the parquet files in a folder and below it, or a file, or a list in a file.

    Raises:
        NoSplitError: there is none of that split.
        DataError: there are no parquet files, or they lie in several folders, or as
            ``ParquetStore`` and ``ListedStore``.
    """
    if root.is_file():
        require_pyarrow(root)
        if path_column(_open(root).schema_arrow, names.image):
            return ListedStore(on_disk(root), split, names)
    if root.is_file() and split == "train":
        return ParquetStore(root, [root], names, in_order=in_order)
    if root.is_file() and not root.name.lower().startswith("train"):
        raise NoSplitError(f"{root} has no {split} split beside it")
    folder = root.parent if root.is_file() else root
    files = _of_split(folder, split)
    if len(homes := sorted({path.parent for path in files})) > 1:
        some = ", ".join(str(_below(home, folder)) for home in homes[:3])
        raise DataError(
            f"{folder} has {split} images in several folders of parquet files ({some}): name one "
            f"of them, such as {homes[0]}"
        )
    return ParquetStore(folder, files, names, in_order=in_order)


def _of_split(root: Place, split: Split) -> list[Place]:
    """Return a split's files in a folder and below it, chosen by their names."""
    files: list[Place] = sorted(
        path for path in root.rglob(f"*{PARQUET}") if not _hidden(path, root)
    )
    if not files:
        raise DataError(f"{root} holds no .parquet files")
    for word in _SPLIT_WORDS[split]:
        named = [path for path in files if path.stem.lower().startswith(word)]
        named = named or [path for path in files if path.parent.name.lower() == word]
        if named:
            return named
    words = [word for names in _SPLIT_WORDS.values() for word in names]
    if split == "train" and not any(path.stem.lower().startswith(tuple(words)) for path in files):
        return files
    raise NoSplitError(
        f"{root} has no parquet files of the {split} split (named {_SPLIT_WORDS[split][0]}-...)"
    )


def _below(path: Place, root: Place) -> PurePath:
    """Return where a file lies below a folder."""
    if isinstance(path, RemotePath) and isinstance(root, RemotePath):
        return path.relative_to(root)
    return PurePath(str(path)).relative_to(str(root))


def _hidden(path: Place, root: Place) -> bool:
    return any(part.startswith(".") for part in _below(path, root).parts)


def _open(path: Place) -> Any:
    from pyarrow import parquet

    try:
        if isinstance(path, RemotePath):
            return parquet.ParquetFile(AsFile(RemoteFile(path)), pre_buffer=True)
        return parquet.ParquetFile(path, memory_map=True)  # else it holds a whole row group
    except errors() as error:
        raise DataError(f"{path} is no whole parquet file: {short(error)}") from error
