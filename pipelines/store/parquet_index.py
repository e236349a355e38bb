"""Where in parquet files the bytes of each image lie, so that they can be read at random.

``datasets`` write images uncompressed, one after the other: their bytes are in the file as they
are. So pyarrow reads every image once, and its bytes are looked for in the piece of the file that
its row group has; where they are is kept as the index of tars is. No place is taken on trust, for
it is one where these very bytes are.

Compressed images are nowhere in the file. Up to some gigabytes they are unpacked once, into a file
beside that index; more are refused, for a conversion makes something better of as much room.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import quoted, written_whole

from ..processes import forked
from ..remote.path import Place
from .archive_index import ROW, Index, file_facts, homes, keep, load
from .columns import Columns, errors, short
from .mapped import Mapped
from .table import Places

log = logging.getLogger(__name__)

MOST_UNPACKED = 2**33
"""Compressed images of more bytes than these are not unpacked."""
_ALONE_BYTES = 2**28
"""Files of fewer bytes in all are looked through by this process alone."""
_MOST_FILES = 0xFFFF
"""A row of the index has two bytes for the number of its file."""
_SAY_SECONDS = 10.0
_BATCH = 64
"""Images are unpacked so many at a time."""


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


def placed(root: Place, files: list[Path], columns: list[Columns]) -> Places:
    """Find where the bytes of each image lie: in the files, or in one that they are unpacked into.

    What was found is kept beside the files or in the user's cache, for each named column apart.

    Args:
        root: what the user calls them, for messages.
        files: the parquet files.
        columns: of each.

    Raises:
        DataError: a file is damaged, or its images are compressed and cannot be unpacked.
    """
    if len(files) > _MOST_FILES:
        raise DataError(f"{len(files):,} parquet files are more than the {_MOST_FILES:,} possible")
    mapped = [Mapped(path) for path in files]
    named = _named(columns)
    facts, kept_in = file_facts(mapped), homes(mapped, named)
    facts += [[named]] if named else []
    for home in kept_in:
        if (index := load(home, facts)) is not None:
            return _places(mapped, index.rows)
        unpacked = _unpacked(home)
        if unpacked.is_file() and unpacked.stat().st_size:
            own = [Mapped(unpacked)]
            if (index := load(home, facts + file_facts(own))) is not None:
                return _places(own, index.rows)
    groups = _groups(files, columns)
    source = str(files[0]) if len(files) == 1 else f"{len(files)} parquet files in {root}"
    if not any(group.compressed for group in groups):
        began = time.monotonic()
        rows = _found(source, mapped, columns, groups)
        if rows is not None:
            kept = keep(Index(rows, (), False, b""), kept_in, facts)
            log.info(
                f"indexed {len(rows):,} images in {source} in {time.monotonic() - began:.1f} s "
                f"({f'kept in {kept}' if kept else 'not kept'})"
            )
            return _places(mapped, rows)
    return _unpack(root, source, mapped, columns, groups, facts, kept_in)


def _named(columns: list[Columns]) -> str:
    """Return the image column, if another than the one that is found was named, else ""."""
    return next((own.named for own in columns if own.named), "")


def _places(files: list[Mapped], rows: NDArray[np.void]) -> Places:
    return Places(files, rows["file"].astype(np.int64), rows["offset"], rows["size"])


def _groups(files: list[Path], columns: list[Columns]) -> list[_Group]:
    """Describe the image column of every row group, as the files' footers tell."""
    found = []
    for file, (path, own) in enumerate(zip(files, columns, strict=True)):
        try:
            found += [_Group(file, *facts) for facts in _facts(path, own)]
        except errors() as error:
            raise DataError(f"{path} is damaged: {short(error)}") from error
    return found


def _facts(path: Path, columns: Columns) -> Iterator[tuple[int, int, int, bool, int]]:
    """Yield of each row group of a file what ``_Group`` tells of its image column."""
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as table:
        schema = table.metadata.schema
        place = [leaf.path for leaf in map(schema.column, range(len(schema)))].index(columns.bytes)
        for number in range(table.metadata.num_row_groups):
            # pyarrow ends the process at a column's damaged facts, unless it meets them by reading
            next(table.iter_batches(1, [number], [columns.bytes], use_threads=False), None)
            leaf = table.metadata.row_group(number).column(place)
            if leaf.path_in_schema != columns.bytes:
                raise ValueError(f"row group {number} has no column {columns.bytes!r}")
            start = min(filter(None, (leaf.dictionary_page_offset, leaf.data_page_offset)))
            compressed = leaf.compression != "UNCOMPRESSED"
            end = start + leaf.total_compressed_size
            yield number, start, end, compressed, leaf.total_uncompressed_size


def _images(path: Path, columns: Columns, group: int) -> Iterator[bytes]:
    """Read the images of a row group: their bytes, empty where a row has none."""
    from pyarrow import parquet

    try:
        # mapped: else pyarrow reads all images of the group into memory first
        with parquet.ParquetFile(path, memory_map=True) as table:
            batches = table.iter_batches(
                _BATCH, row_groups=[group], columns=[columns.bytes], use_threads=False
            )
            for batch in batches:
                images = batch.column(0)
                for data in images if columns.bare else images.field("bytes"):
                    yield data.as_py() or b""
    except errors() as error:
        raise DataError(f"{path} is damaged in row group {group}: {short(error)}") from error


def _found(
    source: str, files: list[Mapped], columns: list[Columns], groups: list[_Group]
) -> NDArray[np.void] | None:
    """Find all images in the files, in several processes; None if one is not there as it is."""
    if sum(map(len, files)) < _ALONE_BYTES or len(groups) == 1:
        parts = [_find(files[group.file], columns[group.file], group) for group in groups]
    else:
        log.info(f"indexing {source} ({sum(map(len, files)) / 1e9:,.1f} GB), which is done once")
        by_number = {}
        said = time.monotonic()
        with forked(-1, _share, files, columns, groups) as run:
            for number, part in run(_find_shared, range(len(groups))):
                by_number[number] = part
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    log.info(f"indexing {source}: {len(by_number):,} of {len(groups):,} parts")
        parts = [by_number[number] for number in range(len(groups))]
    whole = [part for part in parts if part is not None]
    return np.concatenate([np.empty(0, ROW), *whole]) if len(whole) == len(parts) else None


_shared: tuple[list[Mapped], list[Columns], list[_Group]]
"""In a worker: what it was forked with."""


def _share(files: list[Mapped], columns: list[Columns], groups: list[_Group]) -> None:
    global _shared
    _shared = files, columns, groups


def _find_shared(number: int) -> tuple[int, NDArray[np.void] | None]:
    files, columns, groups = _shared
    group = groups[number]
    return number, _find(files[group.file], columns[group.file], group)


def _find(file: Mapped, columns: Columns, group: _Group) -> NDArray[np.void] | None:
    """Find the images of a row group in the file; None if one is not there as it is."""
    rows = []
    behind = group.start
    for data in _images(file.path, columns, group.number):
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


def _unpacked(home: Path) -> Path:
    """Return where the images are unpacked to whose index has this home."""
    return home.with_suffix(".fastsiam-images")


def _unpack(
    root: Place,
    source: str,
    mapped: list[Mapped],
    columns: list[Columns],
    groups: list[_Group],
    facts: list[list[str | int]],
    kept_in: list[Path],
) -> Places:
    """Write all images into one file, beside the index that tells where each is."""
    size = sum(group.size for group in groups)
    advice = (
        f"convert them: fastsiam convert parquet --source {quoted(root)}"
        f"{f' --image-column {quoted(named)}' if (named := _named(columns)) else ''} --out DIR, "
        "and name DIR with --data"
    )
    if size > MOST_UNPACKED:
        raise DataError(
            f"the images of {source} are compressed ({size / 1e9:,.0f} GB), so that none can be "
            f"read by itself: {advice}"
        )
    for home in kept_in:
        target = _unpacked(home)
        with contextlib.suppress(OSError):  # a read-only place, or a full one
            target.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(target.parent).free < size:
                continue
            with written_whole(target, by_many=True) as temporary, temporary.open("wb") as out:
                log.info(
                    f"the images of {source} are compressed: they are unpacked, which is done "
                    f"once, into {target} ({size / 1e6:,.0f} MB)"
                )
                rows = _write_all(out, mapped, columns, groups)
            if not rows["size"].any():  # no image at all, for which there is a message
                target.unlink()
                return _places(mapped, rows)
            own = [Mapped(target)]
            keep(Index(rows, (), False, b""), [home], facts + file_facts(own))
            return _places(own, rows)
    raise DataError(
        f"the images of {source} are compressed, and {size / 1e6:,.0f} MB to unpack them into "
        f"could not be had in {' or '.join(str(home.parent) for home in kept_in)}: {advice}"
    )


def _write_all(
    out: IO[Any], files: list[Mapped], columns: list[Columns], groups: list[_Group]
) -> NDArray[np.void]:
    """Write the images of all groups one after the other; return the rows of their index."""
    rows = []
    at = 0
    said = time.monotonic()
    for done, group in enumerate(groups):
        for data in _images(files[group.file].path, columns[group.file], group.number):
            out.write(data)
            rows.append(_row(0, at, len(data)))
            at += len(data)
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            log.info(f"unpacked {done + 1:,} of {len(groups):,} row groups")
    return np.array(rows, ROW)
