"""Row groups of parquet files: their images in order, and an index of where each image lies.

``datasets`` writes images uncompressed, one after the other. To build the index, pyarrow reads
every image once, and its bytes are searched in the part of the file that holds its row group. So
every offset in the index is one where the image's bytes were found.

The bytes of compressed images are not in the file. Up to 8 GiB of them are unpacked once, into a
file beside the index. More are refused: a conversion takes as much space.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import tally
from fastsiam.errors import DataError
from fastsiam.files import written_whole

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .columns import Columns, reading
from .files import FileReader, Mapped
from .index import ROW, Index, are_small, images_beside
from .tasks import numbered

log = logging.getLogger(__name__)

PARQUET = ".parquet"
MOST_UNPACKED = 2**33
"""Compressed images of more bytes than these are not unpacked."""
_BATCH = 64
"""Images are read so many at a time."""


def open_table(path: Place, metadata: Any = None) -> Any:
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


class Piece(NamedTuple):
    """The part of a file that has the images of a row group, as the file's footer tells."""

    start: int
    end: int
    is_compressed: bool
    size: int
    """Bytes of the images, unpacked."""


@dataclass(frozen=True)
class RowGroup:
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

    def piece(self) -> Piece:
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
            return Piece(start, end, is_compressed, column.total_uncompressed_size)

    def _open(self) -> Any:
        return open_table(self.path, self.metadata)

    def _batches(self, table: Any, rows: int) -> Iterator[Any]:
        column = self.columns.bytes
        batches = table.iter_batches(rows, [self.number], [column], use_threads=False)
        return (batch.column(0) for batch in batches)


def build(
    files: Sequence[Mapped],
    groups: Sequence[RowGroup],
    places: Sequence[Path],
    source: str,
    advice: str,
) -> Index:
    """Find where the bytes of each image lie: in the files, or in one that they are unpacked into.

    Args:
        files: the parquet files.
        groups: all their row groups.
        places: where the index may be kept.
        source: the files, for messages.
        advice: what the user can do where images cannot be unpacked.

    Raises:
        DataError: a file is damaged, or its images are compressed and cannot be unpacked.
    """
    pieces = [group.piece() for group in groups]

    def find(number: int) -> NDArray[np.void] | None:
        return _find(files[groups[number].file], groups[number], pieces[number])

    if not any(piece.is_compressed for piece in pieces):
        if are_small(files) or len(groups) == 1:
            parts = [find(number) for number in range(len(groups))]
        else:
            parts = numbered(find, len(groups), f"indexing {source}, row groups")
        rows = [part for part in parts if part is not None]
        if len(rows) == len(parts):
            return Index({"rows": np.concatenate([np.zeros(0, ROW), *rows])})
    return _unpack(groups, sum(piece.size for piece in pieces), places, source, advice)


def _find(file: Mapped, group: RowGroup, piece: Piece) -> NDArray[np.void] | None:
    """Find the images of a row group in the file; None if one is not there as it is.

    They lie one after the other, except for several that are alike, of which one may be stored.
    """
    rows, behind = [], piece.start
    for data in group.images():
        at = file.find(data, behind, piece.end)
        if at < 0 and (at := file.find(data, piece.start, piece.end)) < 0:
            return None
        rows.append(_row(group.file, at, len(data)))
        behind = max(behind, at + len(data))
    return np.array(rows, ROW)


def _row(file: int, offset: int, size: int) -> tuple[int, ...]:
    return offset, size, -1, file, 0, 0, 0


def _unpack(
    groups: Sequence[RowGroup], size: int, places: Sequence[Path], source: str, advice: str
) -> Index:
    """Write all images, of so many bytes, into one file beside the first place that takes it."""
    if size > MOST_UNPACKED:
        raise DataError(
            f"the images of {source} are compressed ({size / 1e9:,.0f} GB), so that none can be "
            f"read by itself: {advice}"
        )
    for place in places:
        target = images_beside(place)
        with contextlib.suppress(OSError):  # a read-only place, or a full one
            target.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(target.parent).free >= size:
                return _unpack_into(target, groups, size, source)
    raise DataError(
        f"the images of {source} are compressed, and {size / 1e6:,.0f} MB to unpack them into "
        f"could not be had in {' or '.join(str(place.parent) for place in places)}: {advice}"
    )


def _unpack_into(target: Path, groups: Sequence[RowGroup], size: int, source: str) -> Index:
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
