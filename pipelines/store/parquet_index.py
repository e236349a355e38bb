"""Where in parquet files the bytes of each image lie, so that they can be read at random.

``datasets`` write images uncompressed, one after the other: their bytes are in the file as they
are. So pyarrow reads every image once, and its bytes are looked for in the piece of the file that
its row group has; where they are is kept in an index. No place is taken on trust, for it is one
where these very bytes are.

Compressed images are nowhere in the file. Up to some gigabytes they are unpacked once, into a file
beside that index; more are refused, for a conversion makes something better of as much room.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import tally
from fastsiam.errors import DataError
from fastsiam.files import quoted, written_whole

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .columns import Columns, errors, short
from .files import FileReader
from .index import ALONE_BYTES, ROW, Index, images_beside, in_processes, indexed
from .mapped import Mapped

log = logging.getLogger(__name__)

PARQUET = ".parquet"
MOST_UNPACKED = 2**33
"""Compressed images of more bytes than these are not unpacked."""
_BATCH = 64
"""Images are read so many at a time."""


class _Group(NamedTuple):
    """The image column of one row group."""

    file: int
    number: int
    start: int
    """Where in the file it begins, in bytes."""
    end: int
    compressed: bool
    size: int
    """Its bytes, unpacked."""


def indexed_places(
    root: Place, paths: Sequence[Path], columns: Sequence[Columns]
) -> tuple[list[Mapped], NDArray[np.void]]:
    """Find where the bytes of each image lie: in the files, or in one that they are unpacked into.

    Args:
        root: what the user calls the files, for messages.
        paths: the parquet files.
        columns: of each.

    Returns:
        The files, mapped; (images,) places in them, of type ROW.

    Raises:
        DataError: a file is damaged, or its images are compressed and cannot be unpacked.
    """
    files = [Mapped(path) for path in paths]
    source = str(paths[0]) if len(paths) == 1 else f"{len(paths)} parquet files in {root}"
    named = next((own.named for own in columns if own.named), "")

    def build(places: Sequence[Path]) -> Index:
        groups = _groups(paths, columns)
        if not any(group.compressed for group in groups):
            rows = _find_all(files, columns, groups, source)
            if rows is not None:
                return Index({"rows": rows})
        advice = (
            f"convert them: fastsiam convert parquet --source {quoted(root)}"
            f"{f' --image-column {quoted(named)}' if named else ''} --out DIR, "
            "and name DIR with --data"
        )
        return _unpack(paths, columns, groups, source, advice, places)

    index = indexed(files, source, build, column=named)
    return [Mapped(index.images)] if index.images else files, index.arrays["rows"]


def open_table(path: Place) -> Any:
    """Open a parquet file by pyarrow.

    Raises:
        DataError: it is damaged.
    """
    from pyarrow import parquet

    try:
        if isinstance(path, RemotePath):
            file = RemoteFile(path)
            return parquet.ParquetFile(FileReader(file.read, 0, len(file)), pre_buffer=True)
        # mapped: else pyarrow reads all images of a row group into memory
        return parquet.ParquetFile(path, memory_map=True)
    except errors() as error:
        raise DataError(f"{path} is no whole parquet file: {short(error)}") from error


def images_of_group(path: Place, columns: Columns, group: int) -> Iterator[bytes]:
    """Read the images of a row group: their bytes, empty where a row has none.

    Raises:
        DataError: the group is damaged.
    """
    try:
        with open_table(path) as table:
            batches = table.iter_batches(
                _BATCH, row_groups=[group], columns=[columns.bytes], use_threads=False
            )
            for batch in batches:
                images = batch.column(0)
                for data in images if columns.bare else images.field("bytes"):
                    yield data.as_py() or b""
    except errors() as error:
        raise DataError(f"{path} is damaged in row group {group}: {short(error)}") from error


def _groups(paths: Sequence[Path], columns: Sequence[Columns]) -> list[_Group]:
    """Describe the image column of every row group, as the files' footers tell."""
    found = []
    for file, (path, own) in enumerate(zip(paths, columns, strict=True)):
        try:
            found += [_Group(file, *facts) for facts in _facts(path, own.bytes)]
        except errors() as error:
            raise DataError(f"{path} is damaged: {short(error)}") from error
    return found


def _facts(path: Path, column: str) -> Iterator[tuple[int, int, int, bool, int]]:
    """Yield of each row group of a file what ``_Group`` tells of its image column."""
    with open_table(path) as table:
        schema = table.metadata.schema
        place = [leaf.path for leaf in map(schema.column, range(len(schema)))].index(column)
        for number in range(table.metadata.num_row_groups):
            # pyarrow ends the process at a column's damaged facts, unless it meets them by reading
            next(table.iter_batches(1, [number], [column], use_threads=False), None)
            leaf = table.metadata.row_group(number).column(place)
            if leaf.path_in_schema != column:
                raise ValueError(f"row group {number} has no column {column!r}")
            start = min(filter(None, (leaf.dictionary_page_offset, leaf.data_page_offset)))
            compressed = leaf.compression != "UNCOMPRESSED"
            end = start + leaf.total_compressed_size
            yield number, start, end, compressed, leaf.total_uncompressed_size


def _find_all(
    files: Sequence[Mapped], columns: Sequence[Columns], groups: Sequence[_Group], source: str
) -> NDArray[np.void] | None:
    """Find all images in the files; None if one is not there as it is."""

    def find(number: int) -> NDArray[np.void] | None:
        group = groups[number]
        return _find(files[group.file], columns[group.file], group)

    if sum(map(len, files)) < ALONE_BYTES or len(groups) == 1:
        parts = [find(number) for number in range(len(groups))]
    else:
        parts = in_processes(find, len(groups), f"indexing {source}, row groups")
    whole = [part for part in parts if part is not None]
    return np.concatenate([np.zeros(0, ROW), *whole]) if len(whole) == len(parts) else None


def _find(file: Mapped, columns: Columns, group: _Group) -> NDArray[np.void] | None:
    """Find the images of a row group in the file; None if one is not there as it is."""
    rows = []
    behind = group.start
    for data in images_of_group(file.path, columns, group.number):
        at = file.find(data, behind, group.end)
        if at < 0:  # one of several that are alike is stored once
            at = file.find(data, group.start, group.end)
        if at < 0:
            return None
        rows.append(_row(group.file, at, len(data)))
        behind = max(behind, at + len(data))
    return np.array(rows, ROW)


def _row(file: int, offset: int, size: int) -> tuple[int, ...]:
    return offset, size, -1, file, 0, 0, 0


def _unpack(
    paths: Sequence[Path],
    columns: Sequence[Columns],
    groups: Sequence[_Group],
    source: str,
    advice: str,
    places: Sequence[Path],
) -> Index:
    """Write all images into one file, beside the index that tells where each is.

    Args:
        paths: the parquet files.
        columns: of each.
        groups: all row groups.
        source: the files, for messages.
        advice: what else the user can do.
        places: where the index may be kept.

    Raises:
        DataError: there are too many bytes, or no place takes them.
    """
    size = sum(group.size for group in groups)
    if size > MOST_UNPACKED:
        raise DataError(
            f"the images of {source} are compressed ({size / 1e9:,.0f} GB), so that none can be "
            f"read by itself: {advice}"
        )
    for place in places:
        target = images_beside(place)
        with contextlib.suppress(OSError):  # a read-only place, or a full one
            target.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(target.parent).free < size:
                continue
            rows: list[tuple[int, ...]] = []
            with (
                written_whole(target, by_many=True) as temporary,
                temporary.open("wb") as out,
                tally(f"unpacking {source}, row groups", len(groups)) as done,
            ):
                log.info(
                    f"the images of {source} are compressed: they are unpacked, which is done "
                    f"once, into {target} ({size / 1e6:,.0f} MB)"
                )
                for group in groups:
                    file = group.file
                    for data in images_of_group(paths[file], columns[file], group.number):
                        rows.append(_row(0, out.tell(), len(data)))
                        out.write(data)
                    done.add()
                unpacked = out.tell()
            if unpacked:
                return Index({"rows": np.array(rows, ROW)}, target)
            target.unlink()  # no image at all, for which there is a message
            return Index({"rows": np.array(rows, ROW)})
    raise DataError(
        f"the images of {source} are compressed, and {size / 1e6:,.0f} MB to unpack them into "
        f"could not be had in {' or '.join(str(place.parent) for place in places)}: {advice}"
    )
