"""Images in parquet files, as ``datasets`` and the Hub have them: an image struct and a label.

A conversion reads images in order by pyarrow, one row group after the other. Training reads them in
random order, through an index of their offsets. ``datasets`` writes images uncompressed, one after
the other. To build the index, pyarrow reads every image once, and its bytes are searched in the
part of the file that holds its row group. So every offset in the index is one where the image's
bytes were found.

The bytes of compressed images are not in the file. Up to 8 GiB of them are unpacked once, into a
file beside the index. More are refused: a conversion takes as much space.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.console import tally
from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import quoted, written_whole

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .base import Split, Store
from .columns import Columns, path_column, reading, require_pyarrow
from .files import FileReader, Mapped, on_disk
from .index import ROW, Index, are_small, images_beside, open_index
from .listed import ListedStore
from .probe import Bytes
from .table import TableStore
from .tasks import numbered

log = logging.getLogger(__name__)

PARQUET = ".parquet"
MOST_UNPACKED = 2**33
"""Compressed images of more bytes than these are not unpacked."""
_BATCH = 64
"""Images are read so many at a time."""
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
        index = open_index(
            mapped,
            source,
            lambda places: self._build(mapped, groups, places, source),
            column=self._named,
        )
        rows = index.arrays["rows"]
        if len(rows) != len(self):
            raise DataError(f"{root} is damaged: its columns are of several lengths")
        files = [Mapped(index.images)] if index.images else mapped
        self._set_places(files, rows["file"], rows["offset"], rows["size"])
        self._refuse_paths_alone()

    def _build(
        self,
        files: Sequence[Mapped],
        groups: Sequence[_RowGroup],
        places: Sequence[Path],
        source: str,
    ) -> Index:
        """Find where the bytes of images lie: in the files, or in one that they are unpacked into.

        Raises:
            DataError: a file is damaged, or its images are compressed and cannot be unpacked.
        """
        pieces = [group.piece() for group in groups]

        def find(number: int) -> NDArray[np.void] | None:
            return groups[number].find_images(files[groups[number].file], pieces[number])

        if not any(piece.is_compressed for piece in pieces):
            if are_small(files) or len(groups) == 1:
                parts = [find(number) for number in range(len(groups))]
            else:
                parts = numbered(find, len(groups), f"indexing {source}, row groups")
            rows = [part for part in parts if part is not None]
            if len(rows) == len(parts):
                return Index({"rows": np.concatenate([np.zeros(0, ROW), *rows])})
        size = sum(piece.size for piece in pieces)
        option = f" --image-column {quoted(self._named)}" if self._named else ""
        advice = (
            f"convert them: fastsiam convert parquet --source {quoted(self.root)}{option} "
            "--out DIR, and name DIR with --data"
        )
        if size > MOST_UNPACKED:
            raise DataError(
                f"the images of {source} are compressed ({size / 1e9:,.0f} GB), so that none can "
                f"be read by itself: {advice}"
            )
        for place in places:
            target = images_beside(place)
            with contextlib.suppress(OSError):  # a read-only place, or a full one
                target.parent.mkdir(parents=True, exist_ok=True)
                if shutil.disk_usage(target.parent).free >= size:
                    return _unpack_all(target, groups, size, source)
        raise DataError(
            f"the images of {source} are compressed, and {size / 1e6:,.0f} MB to unpack them into "
            f"could not be had in {' or '.join(str(place.parent) for place in places)}: {advice}"
        )

    def read(self, index: int) -> Bytes:
        """Return an image's bytes: a view into a mapped file, or of a row group read in order."""
        if self._reader is None:
            return super().read(index)
        return self._unpack(index, self._reader.read(self.position(index)))

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
    """Open a split of the parquet files in a folder and below it, or a file, or a list in a file.

    Raises:
        NoSplitError: there is no such split.
        DataError: there are no parquet files, or they lie in several folders, or as
            ``ParquetStore`` and ``ListedStore``.
    """
    if root.is_file():
        require_pyarrow(root)
        if path_column(_open_table(root).schema_arrow, names.image):
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


class _Piece(NamedTuple):
    """The part of a file that has the images of a row group, as the file's footer tells."""

    start: int
    end: int
    is_compressed: bool
    size: int
    """Bytes of the images, unpacked."""


@dataclass(frozen=True)
class _RowGroup:
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

    def piece(self) -> _Piece:
        """Look up the group's piece of the file.

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
            is_compressed = column.compression != "UNCOMPRESSED"
            return _Piece(start, end, is_compressed, column.total_uncompressed_size)

    def find_images(self, file: Mapped, piece: _Piece) -> NDArray[np.void] | None:
        """Find the images in the mapped file; None if one is not there as it is.

        They lie one after the other, except for several that are alike, of which one may be stored.
        """
        rows, behind = [], piece.start
        for data in self.images():
            at = file.find(data, behind, piece.end)
            if at < 0 and (at := file.find(data, piece.start, piece.end)) < 0:
                return None
            rows.append(_row(self.file, at, len(data)))
            behind = max(behind, at + len(data))
        return np.array(rows, ROW)

    def _open(self) -> Any:
        return _open_table(self.path, self.metadata)

    def _batches(self, table: Any, rows: int) -> Iterator[Any]:
        column = self.columns.bytes
        batches = table.iter_batches(rows, [self.number], [column], use_threads=False)
        return (batch.column(0) for batch in batches)


def _row(file: int, offset: int, size: int) -> tuple[int, ...]:
    return offset, size, -1, file, 0, 0, 0


def _unpack_all(target: Path, groups: Sequence[_RowGroup], size: int, source: str) -> Index:
    """Write all images, of so many bytes, into one file."""
    rows: list[tuple[int, ...]] = []
    with (
        written_whole(target, by_many=True) as temporary,
        temporary.open("wb") as out,
        tally(f"unpacking {source}, row groups", len(groups)) as done,
    ):
        log.info(
            f"the images of {source} are compressed: they are unpacked, which is done once, into "
            f"{target} ({size / 1e6:,.0f} MB)"
        )
        for group in groups:
            for data in group.images():
                rows.append(_row(0, out.tell(), len(data)))
                out.write(data)
            done.add()
    if target.stat().st_size:
        return Index({"rows": np.array(rows, ROW)}, target)
    target.unlink()  # no row has bytes, for which there is a message
    return Index({"rows": np.array(rows, ROW)})
