"""Images in parquet files, as ``datasets`` and the Hub have them: an image struct and a label.

A conversion reads images in order by pyarrow, one row group after the other. Training reads them in
random order, through an index of their offsets. ``datasets`` writes images uncompressed, one after
the other. To build the index, pyarrow reads every image once, and its bytes are searched in the
part of the file that holds its row group. So every offset in the index is one where the image's
bytes were found.

The bytes of compressed images are not in the file: such files are converted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.console import tally
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import quoted
from fastsiam.kernels.cores import cores

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .base import SPLIT_NAMES, Split, Store
from .columns import Columns, reading, require_pyarrow
from .files import FileReader, Mapped
from .index import ROW, Index, open_index
from .probe import Bytes
from .table import TableStore

PARQUET = ".parquet"
_BATCH = 64
"""Images are read so many at a time."""


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
            one, or images are compressed and not read in order.
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
        tables = [_open_table(path) for path in files]
        self._metadata: list[Any] = [table.metadata for table in tables]
        schemas = [table.schema_arrow for table in tables]
        super().__init__(root, files, schemas, [own.num_rows for own in self._metadata], names)
        groups = [
            _RowGroup(file, path, own, columns, number)
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

    def _index(self, groups: Sequence[_RowGroup]) -> None:
        """Look up where the images lie."""
        here = [path for path in self._paths if isinstance(path, Path)]
        if len(here) < len(self._paths):
            raise self._unplaced("are on another machine")
        files = [Mapped(path) for path in here]
        source = str(here[0]) if len(here) == 1 else f"{len(here)} parquet files in {self.root}"
        index = open_index(
            files, source, lambda: self._build(files, groups, source), column=self._named
        )
        rows = index["rows"]
        if len(rows) != len(self):
            raise DataError(f"{self.root} is damaged: its columns are of several lengths")
        self._set_places(files, rows["file"], rows["offset"], rows["size"])
        self._refuse_paths_alone()

    def _build(self, files: Sequence[Mapped], groups: Sequence[_RowGroup], source: str) -> Index:
        """Find the bytes of the images in the files."""
        rows = [np.zeros(0, ROW)]
        pool = ThreadPoolExecutor(cores())
        try:
            with tally(f"indexing {source}, row groups", len(groups)) as done:
                for own in pool.map(lambda group: group.find_images(files[group.file]), groups):
                    if own is None:
                        raise self._unplaced("are compressed")
                    rows.append(own)
                    done.add()
        finally:
            pool.shutdown(cancel_futures=True)
        return {"rows": np.concatenate(rows)}

    def _unplaced(self, why: str) -> DataError:
        """Return the error for images that cannot be read in random order."""
        option = f" --image-column {quoted(self._named)}" if self._named else ""
        return DataError(
            f"the images in {self.root} {why}, and can only be read in order; convert them: "
            f"fastsiam convert parquet --source {quoted(self.root)}{option} --out DIR, and pass "
            "--data DIR"
        )

    def _read(self, index: int) -> Bytes:
        if self._reader is None:
            return super()._read(index)
        return self._reader.read(self.position(index))

    def _read_column(self, file: int, column: str, part: str = "") -> Any:
        leaf = f"{column}.{part}" if part else column
        with _open_table(self._paths[file], self._metadata[file]) as table:
            return table.read([leaf]).column(column)


class _GroupReader:
    """Reads the images of row groups in order.

    Args:
        groups: all of them.
        first: (groups + 1,) position of each group's first image.
    """

    def __init__(self, groups: Sequence[_RowGroup], first: NDArray[np.int64]) -> None:
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
    """Open a split of the parquet files in a folder and below it, or a file.

    Raises:
        NoSplitError: there is no such split.
        DataError: there are no parquet files, or they lie in several folders, or as
            ``ParquetStore``.
    """
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
    for word in SPLIT_NAMES[split]:
        named = [path for path in files if path.stem.lower().startswith(word)]
        named = named or [path for path in files if path.parent.name.lower() == word]
        if named:
            return named
    words = [word for names in SPLIT_NAMES.values() for word in names]
    if split == "train" and not any(path.stem.lower().startswith(tuple(words)) for path in files):
        return files
    raise NoSplitError(
        f"{root} has no parquet files of the {split} split (named {SPLIT_NAMES[split][0]}-...)"
    )


def _below(path: Place, folder: Place) -> PurePath:
    """Return where a file lies below a folder."""
    return path.relative_to(folder)  # type: ignore[arg-type]


def _open_table(path: Place, metadata: Any = None) -> Any:
    """Open a parquet file by pyarrow.

    Args:
        path: the file.
        metadata: what an earlier call read at the file's end, if one did.

    Raises:
        DataError: it is damaged.
    """
    from pyarrow import parquet

    with reading(f"{path} is no whole parquet file"):
        if isinstance(path, RemotePath):
            file = RemoteFile(path)
            reader = FileReader(file.read, 0, len(file))
            return parquet.ParquetFile(reader, metadata=metadata, pre_buffer=True)
        # mapped: else pyarrow reads all images of a row group into memory
        return parquet.ParquetFile(path, metadata=metadata, memory_map=True)


class _RowGroup(NamedTuple):
    """The images of one row group."""

    file: int
    """Number of the file among those of the data set."""
    path: Place
    metadata: Any
    """Of the file, as pyarrow has it."""
    columns: Columns
    number: int
    """Of the group in the file."""

    def images(self) -> Iterator[bytes]:
        """Read the images: their bytes, empty where a row has none.

        Raises:
            DataError: the group is damaged.
        """
        with reading(f"{self.path} is damaged in row group {self.number}"), self._open() as table:
            for images in self._batches(table, _BATCH):
                for data in images if self.columns.bare else images.field("bytes"):
                    yield data.as_py() or b""

    def find_images(self, file: Mapped) -> NDArray[np.void] | None:
        """Find the images in the mapped file; None if they are not there as they are.

        They lie one after the other, except for several that are alike, of which one may be stored.

        Raises:
            DataError: the file is damaged.
        """
        name = self.columns.bytes
        with reading(f"{self.path} is damaged"), self._open() as table:
            schema = table.metadata.schema
            names = [schema.column(i).path for i in range(len(schema))]
            # pyarrow ends the process at damaged metadata of a column, unless it reads them first
            next(self._batches(table, 1), None)
            column = table.metadata.row_group(self.number).column(names.index(name))
            if column.path_in_schema != name:
                raise ValueError(f"row group {self.number} has no column {name!r}")
            start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            end = start + column.total_compressed_size
            if column.compression != "UNCOMPRESSED":
                return None
        rows, behind = [], start
        for data in self.images():
            at = file.find(data, behind, end)
            if at < 0 and (at := file.find(data, start, end)) < 0:
                return None
            rows.append((at, len(data), -1, self.file, 0, 0, 0))
            behind = max(behind, at + len(data))
        return np.array(rows, ROW)

    def _open(self) -> Any:
        return _open_table(self.path, self.metadata)

    def _batches(self, table: Any, rows: int) -> Iterator[Any]:
        column = self.columns.bytes
        batches = table.iter_batches(rows, [self.number], [column], use_threads=False)
        return (batch.column(0) for batch in batches)
