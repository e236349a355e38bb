"""Images in parquet files, as ``datasets`` and the Hub have them: an image struct and a label.

Training reads images in random order, through an index of their offsets (``row_groups``). A
conversion reads them in order by pyarrow, one row group after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import quoted

from ..remote.path import Place
from .base import Split, Store
from .columns import path_column, require_pyarrow
from .files import Mapped, on_disk
from .index import open_index
from .listed import ListedStore
from .probe import Bytes
from .row_groups import PARQUET, RowGroup, build, open_table
from .table import TableStore

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
        tables = [open_table(path) for path in files]
        self._metadata: list[Any] = [table.metadata for table in tables]
        schemas = [table.schema_arrow for table in tables]
        super().__init__(root, files, schemas, [own.num_rows for own in self._metadata], names)
        groups = [
            RowGroup(file, path, own, columns, number)
            for file, (path, own, columns) in enumerate(
                zip(files, self._metadata, self._columns, strict=True)
            )
            for number in range(own.num_row_groups)
        ]
        self._reader: _GroupReader | None = None
        if in_order:  # of an image's size only its group's mean is known
            facts = [own.metadata.row_group(own.number) for own in groups]
            counts = [own.num_rows for own in facts]
            means = [own.total_byte_size // max(1, own.num_rows) for own in facts]
            self.groups = np.repeat(np.arange(len(groups)), counts)
            self._reader = _GroupReader(groups, np.cumsum([0, *counts]))
            nowhere = np.zeros(len(self), np.int64)
            self._set_places((), nowhere, nowhere, np.repeat(means, counts))
        else:
            self._index(groups)
            self._metadata = [None] * len(files)  # megabytes, and only names are read from now on

    def _index(self, groups: Sequence[RowGroup]) -> None:
        """Look up where the images lie."""
        root = self.root
        here = [path for path in self._paths if isinstance(path, Path)]
        if len(here) < len(self._paths):
            raise DataError(
                f"{root} holds parquet files, whose images are read in order alone on another "
                f"machine: convert them with fastsiam convert parquet --source {quoted(root)} "
                "--out DIR, and name DIR or what it is uploaded to"
            )
        mapped = [Mapped(path) for path in here]
        source = str(here[0]) if len(here) == 1 else f"{len(here)} parquet files in {root}"
        named = next((own.named for own in self._columns if own.named), "")
        option = f" --image-column {quoted(named)}" if named else ""
        advice = (
            f"convert them: fastsiam convert parquet --source {quoted(root)}{option} --out DIR, "
            "and name DIR with --data"
        )
        index = open_index(
            mapped,
            source,
            lambda places: build(mapped, groups, places, source, advice),
            column=named,
        )
        rows = index.arrays["rows"]
        if len(rows) != len(self):
            raise DataError(f"{root} is damaged: its columns are of several lengths")
        files = [Mapped(index.images)] if index.images else mapped
        self._set_places(files, rows["file"], rows["offset"], rows["size"])
        self._refuse_paths_alone()

    def read(self, index: int) -> Bytes:
        """Return an image's bytes: a view into a mapped file, or of a row group read in order."""
        if self._reader is None:
            return super().read(index)
        return self._unpack(index, self._reader.read(self.position(index)))

    def _read_column(self, file: int, column: str, part: str = "") -> Any:
        leaf = f"{column}.{part}" if part else column
        with open_table(self._paths[file], self._metadata[file]) as table:
            return table.read([leaf]).column(column)


class _GroupReader:
    """Reads the images of row groups in order.

    Args:
        groups: all of them.
        first: (groups + 1,) position of each group's first image.
    """

    def __init__(self, groups: Sequence[RowGroup], first: NDArray[np.int64]) -> None:
        self._groups, self._first = groups, first
        self._group, self._next = -1, 0
        self._images: Iterator[bytes] = iter(())

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again: at its beginning."""
        return _GroupReader, (self._groups, self._first)

    def read(self, position: int) -> bytes:
        """Return an image's bytes, none if its row has none; begin its group again to go back.

        Raises:
            DataError: the group is damaged.
        """
        group = int(np.searchsorted(self._first, position, side="right")) - 1
        if group != self._group or position < self._next:
            self._group, self._next = group, int(self._first[group])
            self._images = self._groups[group].images()
        for data in self._images:
            self._next += 1
            if self._next > position:
                return data
        own = self._groups[group]
        raise DataError(f"{own.path} is damaged in row group {own.number}: it ends early")


def open_parquet(
    root: Place, split: Split, names: ColumnNames = AUTOMATIC, *, in_order: bool = False
) -> Store:
    """Open a split of the parquet files in a folder and below it, or a file, or a list in a file.

    Raises:
        NoSplitError: there is no such split.
        DataError: there are no parquet files, or they lie in several folders, or as
            ``ParquetStore`` and ``ListedStore``.
    """
    if root.is_file():
        require_pyarrow(root)
        if path_column(open_table(root).schema_arrow, names.image):
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
        path
        for path in root.rglob(f"*{PARQUET}")
        if not any(part.startswith(".") for part in _below(path, root).parts)
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


def _below(path: Place, folder: Place) -> PurePath:
    """Return where a file lies below a folder."""
    return path.relative_to(folder)  # type: ignore[arg-type]
