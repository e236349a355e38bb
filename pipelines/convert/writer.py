"""Writer of .beton files: parallel, resumable and deterministic.

A worker prepares a block of about 8 MiB in memory, waits until the previous block has its place in
the partial file, and writes. Images therefore never pass between processes, and the file is the
same for any number of workers. A journal next to the file records each finished block. Metadata,
annex and table are written after the blocks, then the header. Finally the file is renamed.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import zlib
from collections import Counter
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.errors import DataError, ImageError
from fastsiam.files import reason, write_at

from ..store import Store
from ..store.beton import FIELD, HEADER, METADATA, RECORD, head, pack_annex, page_size
from ..store.probe import Bytes
from ..workers import process_pool
from . import journal
from .journal import ROW, Block
from .manifest import check_existing, describe, plan_of
from .prepare import read_image

BLOCK_BYTES = 2**23
"""Approximate size of a block's images in the source, in bytes."""
_BLOCK_IMAGES = 4096
"""Maximum images per block. Blocks of a large group have more, so that it has at most 16 blocks."""
_AHEAD = 64
"""Number of images of a remote source to prefetch while as many others are prepared."""


class BadImagesError(DataError):
    """Some images of the source are bad; ``bad`` lists the location and error of each."""

    def __init__(self, message: str, bad: list[tuple[str, str]]) -> None:
        super().__init__(message)
        self.bad = bad


def write(
    store: Store,
    indices: NDArray[np.int64],
    path: Path,
    config: ConvertConfig,
    console: Console,
) -> dict[str, Any]:
    """Write images of a store to a .beton file, or resume an earlier run.

    Args:
        store: the source.
        indices: (images,) the images to convert, in order.
        path: the output file; it gets this name when it is complete.
        config: options of the conversion.
        console: shows how many images an earlier run wrote, and the progress after each block.

    Returns:
        The description of the file, for the manifest.

    Raises:
        BadImagesError: some images are bad and ``config.skip_bad`` is off.
        DataError: the source cannot be read, the file cannot be written, or it exists already
            and has a different plan.
    """
    plan = plan_of(store, indices, config)
    partial = path.with_name(f"{path.name}.partial")
    journal_path = path.with_name(f"{path.name}.journal")
    blocks: list[Block] = []
    try:
        with journal.open_locked(journal_path, console.warn) as log:
            if path.exists():
                journal_path.unlink(missing_ok=True)
                about = check_existing(path, plan)
                partial.unlink(missing_ok=True)
            else:
                blocks = journal.resume(log, plan, partial, console.say)
                _write_blocks(store, indices, partial, config, blocks, log, console)
                _check_bad(store, blocks, config)
                about = _finish(store, blocks, partial, plan)
                os.replace(partial, path)
                journal_path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"no space for {path} ({error.strerror}): "
                f"{_format_space(store.sizes()[indices], blocks, path.parent)}; free some space, "
                "then run the same command again to resume"
            ) from error
        raise DataError(f"cannot write {path}: {reason(error)}") from error
    return about


def _format_space(sizes: NDArray[np.int64], blocks: list[Block], folder: Path) -> str:
    """Format the space that the remaining images need, at the ratio so far, and the free space."""
    images = sum(block.images for block in blocks)
    written = sum(block.end - block.start for block in blocks)
    ratio = written / max(1, int(sizes[:images].sum())) if images else 1.0
    needed, free = ratio * int(sizes[images:].sum()), shutil.disk_usage(folder).free
    return f"it needs about {needed / 1e6:,.1f} MB more, and {free / 1e6:,.1f} MB is free"


def _write_blocks(
    store: Store,
    indices: NDArray[np.int64],
    partial: Path,
    config: ConvertConfig,
    blocks: list[Block],
    log: IO[bytes],
    console: Console,
) -> None:
    """Write the missing blocks; append each one to ``blocks`` and to the journal."""
    sizes = store.sizes()[indices]
    edges = _block_edges(sizes, None if store.groups is None else store.groups[indices])
    tables = HEADER.itemsize + 2 * FIELD.itemsize + len(indices) * METADATA.itemsize
    start = blocks[-1].end if blocks else _aligned(tables, 4096)
    job = Job(store, config, partial, len(blocks), start)
    tasks = list(enumerate(np.split(indices, edges[1:-1])))[len(blocks) :]
    images_done = int(edges[len(blocks)])
    with (
        console.tally(f"{partial.stem}: images", len(indices), done=images_done) as tally,
        process_pool(config.workers, job.write_block, forks=not store.is_remote) as run,
    ):
        for block in run(tasks):
            blocks.append(block)
            log.write(block.line())
            log.flush()
            tally.add(block.images)


def _block_edges(sizes: NDArray[np.int64], groups: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the first image of every block, then the number of images: (blocks + 1,).

    Args:
        sizes: (images,) bytes of each image in the source.
        groups: (images,) the piece of the source that contains each image, if the source can
            only read complete pieces. A block never spans two pieces.
    """
    if groups is None:
        groups = (np.cumsum(sizes) - sizes) // BLOCK_BYTES
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(sizes)]
    cuts: list[int] = []
    for first, last in itertools.pairwise(edges):
        # Each block reads its group from the start, so a group should have few blocks.
        cuts += range(first, last, max(_BLOCK_IMAGES, -(-(last - first) // 16)))
    return np.array([*(cuts or [0]), len(sizes)], np.int64)


def _aligned(offset: int, unit: int) -> int:
    """Round an offset up to a multiple of ``unit``."""
    return offset + -offset % unit


class Job:
    """Block writer that runs in worker processes, which share the offset of the next block.

    Workers are forked, so the job is not copied. For a remote store it is pickled instead.
    ``number`` is the first missing block, and ``start`` its offset in the file ``partial``.
    """

    def __init__(
        self, store: Store, config: ConvertConfig, partial: Path, number: int, start: int
    ) -> None:
        self._store, self._config, self._partial = store, config, partial
        context = get_context("forkserver" if store.is_remote else "fork")
        self._advanced = context.Condition()
        self._turn: Any = context.Array("q", [number, start], lock=False)
        """Number of the next block to place, and its offset."""

    def write_block(self, task: tuple[int, NDArray[np.int64]]) -> Block:
        """Prepare a block, wait until the previous one has its place in the file, and write it."""
        number, images = task
        block, records = Block(0, 0, np.zeros(0, ROW), {}, []), list[Bytes]()
        try:
            block, records = self._prepare(images.tolist())
        finally:  # after an error too: the workers of later blocks wait for it
            with self._advanced:
                self._advanced.wait_for(lambda: self._turn[0] == number)
                block = _place_block(block, self._turn[1])
                self._turn[:] = number + 1, block.end
                self._advanced.notify_all()
        for row, data in zip(block.rows.tolist(), records, strict=True):
            write_at(self._file, data, row[1])  # pwritev took four times as long on ext4
        return block

    @cached_property
    def _file(self) -> int:
        """File descriptor of the partial file in this worker."""
        return os.open(self._partial, os.O_WRONLY)

    def _prepare(self, images: list[int]) -> tuple[Block, list[Bytes]]:
        """Read and prepare images; return their block, still without offsets, and their data."""
        rows, records, counts, bad = [], [], Counter[str](), []
        for at, index in enumerate(images):
            if at % _AHEAD == 0:
                self._store.prefetch(images[at : at + 2 * _AHEAD])
            try:
                record = read_image(self._store, index, self._config)
            except ImageError as error:
                bad.append((index, error.reason))
            except ValueError as error:
                bad.append((index, str(error)))
            else:
                counts[record.how] += 1
                records.append(record.data)
                facts = len(record.data), zlib.crc32(record.data), record.width, record.height
                rows.append((index, 0, *facts, record.mode))
        return Block(0, 0, np.array(rows, ROW), dict(counts), bad), records


def _place_block(block: Block, start: int) -> Block:
    """Return a block with file offsets for itself and its images, from ``start`` on.

    FFCV reads a file in pages, whose size is a power of 2, and no image may cross a page boundary.
    The file's page size is not known yet, but an image that lies within a page of the smallest
    possible size also lies within any larger page.
    """
    end, starts = start, []
    for size in block.rows["size"].tolist():
        page = page_size(size)
        starts.append(_aligned(end, page) if end % page + size > page else end)
        end = starts[-1] + size
    block.rows["start"] = starts
    return block._replace(start=start, end=end)


def _check_bad(store: Store, blocks: list[Block], config: ConvertConfig) -> None:
    """Raise BadImagesError for bad images without ``skip_bad``, or if a whole split is bad."""
    bad = [(store.where(index), reason) for block in blocks for index, reason in block.bad]
    images = sum(len(block.rows) for block in blocks)
    if not images and config.part_of[1] == 1:
        raise BadImagesError(f"none of the {len(bad):,} images of {store.root} can be used", bad)
    if bad and not config.skip_bad:
        raise BadImagesError(
            f"{len(bad):,} of {len(bad) + images:,} images of {store.root} are bad; repair them "
            "(the conversion starts over), or leave them out with --skip-bad (it resumes)",
            bad,
        )


def _finish(
    store: Store, blocks: list[Block], partial: Path, plan: dict[str, Any]
) -> dict[str, Any]:
    """Write metadata, annex and table, then the header; return the file's description."""
    rows = np.concatenate([block.rows for block in blocks])
    metadata = np.zeros(len(rows), METADATA)
    for field in ("mode", "width", "height"):
        metadata["image"][field] = rows[field]
    metadata["image"]["data_ptr"] = rows["start"]
    metadata["label"] = store.labels[rows["source"]]
    table = np.zeros(len(rows), RECORD)
    table["sample_id"] = np.arange(len(rows))
    table["ptr"], table["size"] = rows["start"], rows["size"]
    tables_crc32 = zlib.crc32(table.tobytes(), zlib.crc32(metadata.tobytes()))
    about = describe(store, blocks, plan, tables_crc32)
    names = list(map(store.name, rows["source"].tolist()))
    annex = pack_annex(about, store.classes, rows["crc"].astype(np.uint32), names)
    annex_start = _aligned(blocks[-1].end, 8)
    table_start = _aligned(annex_start + len(annex), 8)
    page = page_size(int(rows["size"].max(initial=0)))
    header = head(len(rows), page, table_start, annex_start, annex)
    gap_end = blocks[0].start  # zeros up to the first image, whatever the partial file has there
    with partial.open("r+b") as file:
        file.truncate(table_start)
        for offset, data in (
            (len(header), metadata.tobytes().ljust(gap_end - len(header), b"\0")),
            (annex_start, annex),
            (table_start, table.tobytes()),
            (0, header),
        ):
            write_at(file.fileno(), data, offset)
        os.fsync(file.fileno())  # raises if a worker's write failed after it returned
    return about
