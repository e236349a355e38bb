"""Prepares the images of a block and writes them, in worker processes.

A worker prepares a block in memory, waits until the block before it has its place in the file, and
writes. So workers prepare in parallel, images pass between no processes, and the file is the same
for any number of workers.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections import Counter
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError, ImageError
from fastsiam.files import explained

from ..processes import AbandonedError
from ..store import Bytes, Store
from .journal import ROW, Block
from .layout import LARGEST_PAGE, image_offset
from .prepare import Record, prepare

_HELD_BYTES = 2**26
"""A worker holds at most about so many bytes of images: it writes a larger block in pieces."""
_AHEAD = 64
"""How many images of a remote source are requested at a time, while as many are prepared."""


class Job:
    """What the workers share: the task, and the offset at which the next block starts.

    The workers are forked, so nothing is copied; for a remote store it is pickled.

    Args:
        store: the source.
        indices: (images,) the images to convert, in order.
        edges: (blocks + 1,) the first image of every block, and the number of images.
        config: options of the conversion.
        partial: the file to write.
        first: number of the first missing block.
        start: its offset in the file.
    """

    def __init__(
        self,
        store: Store,
        indices: NDArray[np.int64],
        edges: NDArray[np.int64],
        config: ConvertConfig,
        partial: Path,
        first: int,
        start: int,
    ) -> None:
        self.store, self.indices, self.edges = store, indices, edges
        self.config, self.partial, self.file = config, partial, -1
        context = get_context("forkserver" if store.is_remote else "fork")
        self._advanced = context.Condition()
        self._next: Synchronized[int] = context.Value("q", first, lock=False)
        self._offset: Synchronized[int] = context.Value("q", start, lock=False)

    def take_turn(self, number: int) -> int:
        """Wait until the block before has its place; return the offset of this one."""
        with self._advanced:
            self._advanced.wait_for(lambda: self._next.value in (number, -1))
            if self._next.value < 0:
                raise AbandonedError
            return self._offset.value

    def pass_turn(self, number: int, end: int) -> None:
        """Let the next block start where this one ends."""
        with self._advanced:
            self._offset.value, self._next.value = end, number + 1
            self._advanced.notify_all()

    def fail(self) -> None:
        """Make the workers that wait for an earlier block abandon theirs."""
        with self._advanced:
            self._next.value = -1
            self._advanced.notify_all()


_job: Job
"""The job of this worker."""


def begin(job: Job) -> None:
    """Set up a new worker: open the file that it writes."""
    global _job
    _job = job
    job.file = os.open(job.partial, os.O_WRONLY)


def write_block(number: int) -> Block:
    """Write a block in a worker; on an error, the other workers abandon theirs.

    Raises:
        DataError: the source cannot be read.
        OSError: the file cannot be written.
        AbandonedError: another block failed.
    """
    try:
        return _write_images(_job, number)
    except BaseException:
        _job.fail()
        raise


def _write_images(job: Job, number: int) -> Block:
    """Prepare the images of a block and write them."""
    first, last = job.edges[number : number + 2].tolist()
    output = _BlockWriter(job, number)
    how: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    retry = False
    images = job.indices[first:last].tolist()
    for at, index in enumerate(images):
        if at % _AHEAD == 0:
            job.store.ahead(images[at : at + 2 * _AHEAD])
        try:
            record = _prepare_image(job, index)
        except DataError as error:
            retry |= _may_be_read_later(job, error)
            bad.append((index, _short_reason(error)))
        except ValueError as error:
            bad.append((index, str(error)))
        else:
            how[record.how] += 1
            output.add(index, record)
    output.close()
    rows = np.array(output.rows, ROW)
    return Block(number, output.start, output.end, rows, dict(how), bad, retry)


class _BlockWriter:
    """Places the images of a block in the file and writes them."""

    def __init__(self, job: Job, number: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        """Of the images that have a place, as ROW names the fields."""
        self.start = self.end = -1
        """Offsets of the block, once it has its turn."""
        self._job, self._number = job, number
        self._held: list[tuple[int, Record]] = []
        self._bytes = 0

    def add(self, index: int, record: Record) -> None:
        """Take the next image; write what is held if it is too much for memory."""
        self._held.append((index, record))
        self._bytes += len(record.data)
        if self._bytes > _HELD_BYTES:  # takes the turn early, and keeps it
            self._write(self._place())

    def close(self) -> None:
        """Give the turn to the next block, and write the images that are left."""
        images = self._place()
        self._job.pass_turn(self._number, self.end)
        self._write(images)

    def _place(self) -> list[tuple[int, Bytes]]:
        """Wait for the block's turn; return offset and data of each image that is held."""
        if self.start < 0:
            self.start = self.end = self._job.take_turn(self._number)
        images = []
        for index, record in self._held:
            data = record.data
            offset = image_offset(self.end, len(data))
            self.end = offset + len(data)
            size = record.width, record.height
            self.rows.append((index, offset, len(data), zlib.crc32(data), *size, record.mode))
            images.append((offset, data))
        self._held.clear()
        self._bytes = 0
        return images

    def _write(self, images: list[tuple[int, Bytes]]) -> None:
        for offset, data in images:
            _write_all(self._job.file, data, offset)


def _prepare_image(job: Job, index: int) -> Record:
    """Read an image and prepare its record.

    Raises:
        ValueError: the image is bad; says why.
        DataError: it cannot be read, or memory is exhausted.
    """
    try:
        data = job.store.read(index)
        if not job.store.is_intact(index, data):
            raise ValueError("its bytes are not those that were written into its file")
        record = prepare(data, job.store.raw_size(index), job.config)
    except MemoryError as error:
        raise DataError(f"out of memory at {job.store.where(index)}: lower --workers") from error
    if len(record.data) > LARGEST_PAGE:
        raise ValueError(f"it takes {len(record.data):,} bytes; shrink it with --max-side")
    return record


def _may_be_read_later(job: Job, error: DataError) -> bool:
    """Tell whether a later start may read an image that could not be read now.

    Raises:
        DataError: not only this image fails: memory, a server, or the whole source.
    """
    cause = error.__cause__
    fetched = job.store.is_remote and not isinstance(error, ImageError)
    if fetched or isinstance(cause, MemoryError):
        raise error
    if not isinstance(cause, OSError) or cause.errno is None:
        return False
    with explained(DataError, f"cannot read {job.store.root}"):
        if not job.store.root.exists():
            raise DataError(
                f"{job.store.root} is gone; restore it and run the same command again to resume"
            ) from error
    if cause.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR):
        raise error
    return True


def _short_reason(error: DataError) -> str:
    """Say why an image is bad, without its name."""
    cause = error.__cause__
    return str((isinstance(cause, OSError) and cause.strerror) or error)


def _write_all(file: int, data: Bytes, offset: int) -> None:
    """Write all bytes, in as many calls as the system needs.

    One call per image: one for many images (``pwritev``) took four times as long on ext4.
    """
    written = os.pwrite(file, data, offset)
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], offset + written)
