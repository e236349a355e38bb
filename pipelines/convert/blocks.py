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
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError, ImageError
from fastsiam.files import explained, write_at

from ..processes import AbandonedError
from ..store import Store
from .journal import ROW, Block
from .layout import LARGEST_PAGE, image_offset
from .prepare import Record, prepare

_HELD_BYTES = 2**26
"""A worker holds at most about so many bytes of images: it writes a larger block in pieces."""
_AHEAD = 64
"""How many images of a remote source are requested at a time, while as many are prepared."""


class Job:
    """Writes blocks in workers, which share the offset at which the next block starts.

    The workers are forked, so nothing is copied; for a remote store it is pickled.

    Args:
        store: the source.
        config: options of the conversion.
        partial: the file to write.
        number: the first missing block.
        start: its offset in the file.
    """

    def __init__(
        self, store: Store, config: ConvertConfig, partial: Path, number: int, start: int
    ) -> None:
        self.store, self.config, self._partial = store, config, partial
        context = get_context("forkserver" if store.is_remote else "fork")
        self._advanced = context.Condition()
        self._turn: Any = context.Array("q", [number, start], lock=False)
        """The block that may take its place, -1 after a failure; and where it starts."""

    def write_block(self, task: tuple[int, NDArray[np.int64]]) -> Block:
        """Prepare and write a block; on an error, the other workers abandon theirs.

        Args:
            task: number of the block, and its images in the source.

        Raises:
            DataError: the source cannot be read.
            OSError: the file cannot be written.
            AbandonedError: another block failed.
        """
        try:
            return self._write_images(task[0], task[1].tolist())
        except BaseException:
            self.pass_turn(-1, 0)
            raise

    def take_turn(self, number: int) -> int:
        """Wait until the block before has its place; return the offset of this one."""
        with self._advanced:
            self._advanced.wait_for(lambda: self._turn[0] in (number, -1))
            if self._turn[0] < 0:
                raise AbandonedError
            return int(self._turn[1])

    def pass_turn(self, number: int, offset: int) -> None:
        """Let a block start at an offset; -1 makes the workers abandon the blocks that wait."""
        with self._advanced:
            if self._turn[0] >= 0:
                self._turn[:] = number, offset
            self._advanced.notify_all()

    @cached_property
    def file(self) -> int:
        """The file, as this worker has it open."""
        return os.open(self._partial, os.O_WRONLY)

    def _write_images(self, number: int, images: list[int]) -> Block:
        output = _Output(self, number)
        how: Counter[str] = Counter()
        bad: list[tuple[int, str]] = []
        retry = False
        for at, index in enumerate(images):
            if at % _AHEAD == 0:
                self.store.ahead(images[at : at + 2 * _AHEAD])
            try:
                record = _prepare_image(self.store, index, self.config)
            except DataError as error:
                retry |= _may_be_read_later(self.store, error)
                bad.append((index, _short_reason(error)))
            except ValueError as error:
                bad.append((index, str(error)))
            else:
                how[record.how] += 1
                output.add(index, record)
        output.write()
        rows = np.array(output.rows, ROW)
        return Block(number, output.start, output.end, rows, dict(how), bad, retry)


class _Output:
    """The images of a block on their way into the file."""

    def __init__(self, job: Job, number: int) -> None:
        self.rows: list[tuple[int, ...]] = []
        """Of the images that have a place, as ROW names the fields."""
        self.start = self.end = -1
        """Offsets of the block, once it has its turn."""
        self._job, self._number = job, number
        self._held: list[tuple[int, int, Record]] = []
        self._bytes = 0

    def add(self, index: int, record: Record) -> None:
        """Take the next image; write what is held if it is too much for memory."""
        self._held.append((index, zlib.crc32(record.data), record))
        self._bytes += len(record.data)
        if self._bytes > _HELD_BYTES:  # takes the turn early, and keeps it
            self.write(last=False)

    def write(self, *, last: bool = True) -> None:
        """Write what is held once the block has its turn; the last piece passes the turn."""
        if self.start < 0:
            self.start = self.end = self._job.take_turn(self._number)
        placed = []
        for index, crc, image in self._held:
            offset, size = image_offset(self.end, len(image.data)), len(image.data)
            self.rows.append((index, offset, size, crc, image.width, image.height, image.mode))
            self.end = offset + size
            placed.append((offset, image.data))
        if last:
            self._job.pass_turn(self._number + 1, self.end)
        for offset, data in placed:  # one call for many (pwritev) took four times as long on ext4
            write_at(self._job.file, data, offset)
        self._held, self._bytes = [], 0


def _prepare_image(store: Store, index: int, config: ConvertConfig) -> Record:
    """Read an image and prepare its record.

    Raises:
        ValueError: the image is bad; says why.
        DataError: it cannot be read, or memory is exhausted.
    """
    try:
        data = store.read(index)
        if not store.is_intact(index, data):
            raise ValueError("its bytes are not those that were written into its file")
        record = prepare(data, store.raw_size(index), config)
    except MemoryError as error:
        raise DataError(f"out of memory at {store.where(index)}: lower --workers") from error
    if len(record.data) > LARGEST_PAGE:
        raise ValueError(f"it takes {len(record.data):,} bytes; shrink it with --max-side")
    return record


def _may_be_read_later(store: Store, error: DataError) -> bool:
    """Tell whether a later start may read an image that could not be read now.

    Raises:
        DataError: not only this image fails: memory, a server, or the whole source.
    """
    cause = error.__cause__
    fetched = store.is_remote and not isinstance(error, ImageError)
    if fetched or isinstance(cause, MemoryError):
        raise error
    if not isinstance(cause, OSError) or cause.errno is None:
        return False
    with explained(DataError, f"cannot read {store.root}"):
        if not store.root.exists():
            raise DataError(
                f"{store.root} is gone; restore it and run the same command again to resume"
            ) from error
    if cause.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR):
        raise error
    return True


def _short_reason(error: DataError) -> str:
    """Say why an image is bad, without its name."""
    cause = error.__cause__
    return str((isinstance(cause, OSError) and cause.strerror) or error)
