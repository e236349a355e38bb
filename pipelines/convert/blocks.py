"""What the worker processes of a conversion do: prepare the images of a block and write them.

A block is prepared in memory; only then does its worker wait to learn where the block before it
ended. So the workers prepare at once, and the file is the same however many there are.
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
from .layout import LARGEST_PAGE, places
from .prepare import Record, prepare

_HELD_BYTES = 2**26
"""Records of more bytes than these are not kept in memory: the block is written in pieces."""


class Job:
    """What the workers of a conversion know: what to write, and whose turn it is.

    They are forked, so nothing of it is copied; for a remote store it is pickled.

    Args:
        store: where the images come from.
        indices: (images,) which of them, in their order.
        cuts: (blocks + 1,) the first image of every block, and the number of images.
        config: what becomes of the images.
        partial: the file to write to.
        first: number of the first block that is missing.
        start: where it begins in the file.
    """

    def __init__(
        self,
        store: Store,
        indices: NDArray[np.int64],
        cuts: NDArray[np.int64],
        config: ConvertConfig,
        partial: Path,
        first: int,
        start: int,
    ) -> None:
        self.store, self.indices, self.cuts = store, indices, cuts
        self.config, self.partial, self.file = config, partial, -1
        context = get_context("forkserver" if store.is_remote else "fork")
        self._changed = context.Condition()
        self._turn: Synchronized[int] = context.Value("q", first, lock=False)
        self._at: Synchronized[int] = context.Value("q", start, lock=False)

    def take_turn(self, number: int) -> int:
        """Wait until the block before has its place; return where this one starts."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn.value in (number, -1))
            if self._turn.value < 0:
                raise AbandonedError
            return self._at.value

    def pass_turn(self, number: int, end: int) -> None:
        """Tell the next block where this one ends."""
        with self._changed:
            self._at.value, self._turn.value = end, number + 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake the workers that wait for a block which will not come: theirs are given up."""
        with self._changed:
            self._turn.value = -1
            self._changed.notify_all()


_AHEAD = 64
"""Images of another machine that are asked for at a time; as many wait for them."""

_job: Job
"""In a worker: what it was forked with."""


def begin(job: Job) -> None:
    """Prepare a new worker: open the file that it writes to."""
    global _job
    _job = job
    job.file = os.open(job.partial, os.O_WRONLY)


def write_block(number: int) -> Block:
    """Write a block in a worker; if that fails, no other waits for it.

    Raises:
        DataError: the source cannot be read.
        OSError: the file cannot be written.
        AbandonedError: another block failed before.
    """
    try:
        return _written(_job, number)
    except BaseException:
        _job.fail()
        raise


def _written(job: Job, number: int) -> Block:
    """Prepare the images of a block and write them."""
    first, last = job.cuts[number : number + 2].tolist()
    records = _Records(job, number, last - first)
    how: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    again = False
    images = job.indices[first:last].tolist()
    for at, index in enumerate(images):
        if at % _AHEAD == 0:
            job.store.ahead(images[at : at + 2 * _AHEAD])
        try:
            record = _prepared(job, index)
        except DataError as error:
            again |= _may_be_read_later(job, error)
            bad.append((index, _reason(error)))
            continue
        except ValueError as error:
            bad.append((index, str(error)))
            continue
        how[record.how] += 1
        records.add(index, record)
    records.finish()
    return Block(number, records.start, records.end, records.rows, dict(how), bad, again)


class _Records:
    """The records of one block on their way into the file."""

    start = end = -1
    """Where the block begins and ends; known when its turn has come."""

    def __init__(self, job: Job, number: int, most: int) -> None:
        self._job, self._number = job, number
        self._rows = np.zeros(most, ROW)
        self._written = self._bytes = 0
        self._held: list[Bytes] = []

    @property
    def rows(self) -> NDArray[np.void]:
        """(images,) of type ROW: those that are written."""
        return self._rows[: self._written]

    def add(self, index: int, record: Record) -> None:
        """Take the next image's record; write what is held if that has become much."""
        self._rows[self._written + len(self._held)] = (
            index,
            0,
            len(record.data),
            zlib.crc32(record.data),
            record.width,
            record.height,
            record.mode,
        )
        self._held.append(record.data)
        self._bytes += len(record.data)
        if self._bytes > _HELD_BYTES:  # take the turn early, and keep it
            self._write(self._place())

    def finish(self) -> None:
        """Let the next block have its turn, and write what is held."""
        starts = self._place()
        self._job.pass_turn(self._number, self.end)
        self._write(starts)

    def _place(self) -> list[int]:
        """Find a place for each record that is held, when the turn has come."""
        if self.start < 0:
            self.start = self.end = self._job.take_turn(self._number)
        starts, self.end = places([len(data) for data in self._held], self.end)
        return starts

    def _write(self, starts: list[int]) -> None:
        """Write the records that are held to their places."""
        self._rows["start"][self._written : self._written + len(starts)] = starts
        for data, at in zip(self._held, starts, strict=True):
            _write_all(self._job.file, data, at)
        self._written += len(starts)
        self._bytes = 0
        self._held.clear()


def _prepared(job: Job, index: int) -> Record:
    """Read an image and make its record.

    Raises:
        ValueError: the image is bad; says why.
        DataError: it cannot be read, or memory does not hold it.
    """
    try:
        data = job.store.read(index)
        if not job.store.is_intact(index, data):
            raise ValueError("its bytes are not those that were written into its file")
        record = prepare(data, job.store.raw_size(index), job.config)
    except MemoryError as error:
        raise DataError(
            f"no memory for {job.store.where(index)}: --workers takes fewer processes"
        ) from error
    if len(record.data) > LARGEST_PAGE:
        raise ValueError(f"it takes {len(record.data):,} bytes; shrink it with --max-side")
    return record


def _may_be_read_later(job: Job, error: DataError) -> bool:
    """Tell whether another try may find an image that could not be read just now.

    Raises:
        DataError: it is not the image alone that fails: memory, a server, the source as a whole.
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
                f"{job.store.root} is gone; the same command goes on from here"
            ) from error
    if cause.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR):
        raise error
    return True


def _reason(error: DataError) -> str:
    """Say in a few words why an image is bad; its name stands beside that."""
    cause = error.__cause__
    return str((isinstance(cause, OSError) and cause.strerror) or error)


def _write_all(file: int, data: Bytes, at: int) -> None:
    """Write all of it, however little the system takes at a time.

    A call for each image: one call for many (``pwritev``) took four times as long on ext4.
    """
    wrote = os.pwrite(file, data, at)
    while wrote < len(data):
        wrote += os.pwrite(file, memoryview(data)[wrote:], at + wrote)
