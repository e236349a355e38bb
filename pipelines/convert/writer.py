"""Writes a store into one .beton file: in parallel, resumable, the same bytes every time.

The images are cut into blocks of about 8 MiB. A worker reads and prepares a block in memory, learns
where the block before it ended, and writes it there; so no byte passes between processes, and the
file does not depend on how many there are. Each finished block is noted in a journal beside the
partial file. At the end come metadata, annex and table, the header last, and then the real name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fastsiam
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError

from ..processes import AbandonedError, forked
from ..store.base import Bytes, Store
from ..store.beton import FIELD, HEADER, METADATA, RAW, RECORD, Annex, BetonStore, head
from . import journal
from .journal import ROW, Block
from .prepare import Record, prepare

BLOCK_BYTES = 2**23
_BLOCK_IMAGES = 4096
_HELD_BYTES = 2**26
"""A block that becomes longer is written in pieces."""
_SMALLEST_PAGE, LARGEST_PAGE = 2**23, 2**31
_SIDES = (32, 64, 128, 224, 256, 384, 512, 1024, 2048)
_FORMAT = 2

_FOR_ONE_PART: dict[str, Any] = {
    "source": "",
    "out": "",
    "part": "",
    "skip_bad": False,
    "workers": -1,
}
"""Options in which the parts of one set may differ."""

Progress = Callable[[int, int], None]
"""Called with the images and the source bytes that are done."""


class BadImagesError(DataError):
    """Images of the source are bad; ``bad`` lists each with the reason."""

    def __init__(self, message: str, bad: list[tuple[str, str]]) -> None:
        super().__init__(message)
        self.bad = bad


def write(
    store: Store,
    indices: NDArray[np.int64],
    path: Path,
    config: ConvertConfig,
    *,
    say: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Write images of a store to a .beton file, or go on with it.

    Args:
        store: where the images come from.
        indices: (images,) which of them, in this order.
        path: the file; nothing has this name before it is whole.
        config: what becomes of the images.
        say: for messages, such as what was found of an earlier try.
        progress: called as blocks are done.

    Returns:
        The split's part of the manifest.

    Raises:
        BadImagesError: some images are bad and ``config.skip_bad`` is off.
        DataError: the source cannot be read, or the file not be written.
    """
    sizes = store.sizes()[indices]
    plan = _plan(store, indices, config)
    partial = path.with_name(f"{path.name}.partial")
    begin = _align(HEADER.itemsize + 2 * FIELD.itemsize + len(indices) * METADATA.itemsize, 4096)
    cuts = _cut(sizes, None if store.groups is None else store.groups[indices])
    with _reporting(path), journal.locked(path.with_name(f"{path.name}.journal")) as log:
        if path.exists():
            about = _finished(path, plan)
            say(f"{path} is there already")
            _forget(partial, Path(log.name))
            return about
        done = journal.read(log, plan, partial, say)
        start = done[-1].end if done else begin
        journal.start(log, plan, partial, done, begin)
        done_images = int(cuts[len(done)])
        done_bytes = int(sizes[:done_images].sum())
        _check_room(path, int(sizes.sum()) - done_bytes, say)
        job = _Job(store, indices, cuts, config, partial, len(done), start)
        progress(done_images, done_bytes)
        blocks = {block.number: block for block in done}
        with forked(config.workers, _begin, job) as run:
            for block in run(_write_block, range(len(done), len(cuts) - 1)):
                log.write(block.line())
                log.flush()
                blocks[block.number] = block
                first, last = cuts[block.number : block.number + 2]
                done_images += int(last - first)
                done_bytes += int(sizes[first:last].sum())
                progress(done_images, done_bytes)
        ordered = [blocks[number] for number in range(len(cuts) - 1)]
        _refuse_bad(store, ordered, config)
        about = _finish(store, ordered, partial, plan, config)
        os.replace(partial, path)
        _forget(Path(log.name))
    return about


def _plan(store: Store, indices: NDArray[np.int64], config: ConvertConfig) -> dict[str, Any]:
    """Describe what is written; equal only for the same images and the same treatment."""
    images = [store.stamp(), store.classes, zlib.crc32(store.labels.tobytes())]
    return {
        "format": _FORMAT,
        "options": asdict(replace(config, source="", out="", workers=-1, skip_bad=False)),
        "source": hashlib.sha256(json.dumps(images).encode()).hexdigest(),
        "images": zlib.crc32(indices.tobytes()),
    }


def _finished(path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of a file that is there already, if it is what is asked for."""
    try:
        about = BetonStore(path).about
    except DataError as error:
        raise DataError(f"{path} is there already, and damaged: delete it first") from error
    known = about.get("plan", {})
    if known == plan:
        return about
    ours, theirs = plan["options"], known.get("options", {})
    others = [f"--{k.replace('_', '-')}" for k in ours if k in theirs and ours[k] != theirs[k]]
    what = (
        f"with another {', '.join(others)}"
        if others
        else "of other images, or of files with other times"
    )
    raise DataError(f"{path} exists already and was made {what}; delete it or choose another --out")


def _forget(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _cut(sizes: NDArray[np.int64], groups: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the first image of every block, and the end: (blocks + 1,)."""
    if groups is None:
        groups = (np.cumsum(sizes) - sizes) // BLOCK_BYTES
    edges = np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(sizes)]])
    cuts = []
    for first, last in itertools.pairwise(edges.tolist()):
        # A group has to be read from its beginning for each block in it, so they are few.
        cuts.append(np.arange(first, last, max(_BLOCK_IMAGES, -(-(last - first) // 16))))
    return np.concatenate([*cuts, [len(sizes)]]).astype(np.int64)


def _check_room(path: Path, needed: int, say: Callable[[str], None]) -> None:
    """Say beforehand what the disk may not hold; encoding can make it less."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        say(
            f"{path.parent} has {free / 1e6:,.0f} MB free and {path.name} may take "
            f"{needed / 1e6:,.0f} MB; should the disk be full, the same command goes on later"
        )


# --- in the workers -------------------------------------------------------------------------------


class _Job:
    """What the workers share; they are forked, so nothing of it is copied."""

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
        context = get_context("fork")
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
        """Let nobody wait for a block that will not come."""
        with self._changed:
            self._turn.value = -1
            self._changed.notify_all()


_job: _Job


def _begin(job: _Job) -> None:
    global _job
    _job = job
    job.file = os.open(job.partial, os.O_WRONLY)


def _write_block(number: int) -> Block:
    job = _job
    try:
        return _written(job, number)
    except BaseException:
        job.fail()
        raise


def _written(job: _Job, number: int) -> Block:
    """Prepare the images of a block and write them; more than a little is not kept in memory."""
    first, last = job.cuts[number : number + 2].tolist()
    rows = np.zeros(last - first, ROW)
    how: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    held: list[Bytes] = []
    start = at = -1
    count = size = 0
    again = False
    for index in job.indices[first:last].tolist():
        try:
            record = _prepared(job, index)
        except DataError as error:
            again |= _may_pass(job, error)
            bad.append((index, _reason(error)))
            continue
        except ValueError as error:
            bad.append((index, str(error)))
            continue
        rows[count + len(held)] = (
            index,
            0,
            len(record.data),
            zlib.crc32(record.data),
            record.width,
            record.height,
            record.mode,
        )
        how[record.how] += 1
        held.append(record.data)
        size += len(record.data)
        if size > _HELD_BYTES:  # take the turn early, and keep it
            if start < 0:
                start = at = job.take_turn(number)
            places, at = _places([len(data) for data in held], at)
            rows["start"][count : count + len(held)] = places
            _write_each(job.file, held, places)
            count, size = count + len(held), 0
            held.clear()
    if start < 0:
        start = at = job.take_turn(number)
    places, at = _places([len(data) for data in held], at)
    rows["start"][count : count + len(held)] = places
    job.pass_turn(number, at)
    _write_each(job.file, held, places)
    return Block(number, start, at, rows[: count + len(held)], dict(how), bad, again)


def _prepared(job: _Job, index: int) -> Record:
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


def _may_pass(job: _Job, error: DataError) -> bool:
    """Tell whether an image that cannot be read may be read later; stop if it is not the image."""
    cause = error.__cause__
    if isinstance(cause, MemoryError):
        raise error
    if not isinstance(cause, OSError) or cause.errno is None:
        return False
    if not job.store.root.exists():
        raise DataError(f"{job.store.root} is gone") from error
    if cause.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR):
        raise error
    return True


def _reason(error: DataError) -> str:
    cause = error.__cause__
    return str((isinstance(cause, OSError) and cause.strerror) or error)


def _places(lengths: list[int], at: int) -> tuple[list[int], int]:
    """Lay records one after the other so that FFCV's page cache can read them.

    None crosses a page of 8 MiB, and a longer one begins at a multiple of the next power of 2; so
    none crosses a page of the longest one's size, which becomes the file's.
    """
    places = []
    for length in lengths:
        page = page_of(length)
        if at % page + length > page:
            at = _align(at, page)
        places.append(at)
        at += length
    return places, at


def page_of(length: int) -> int:
    """Return the smallest page that holds a record: a power of 2 of 8 MiB or more."""
    return max(_SMALLEST_PAGE, 1 << (length - 1).bit_length()) if length else _SMALLEST_PAGE


def _write_each(file: int, data: list[Bytes], places: list[int]) -> None:
    for part, at in zip(data, places, strict=True):
        _write_all(file, part, at)


def _write_all(file: int, data: Bytes, at: int) -> None:
    """Write all of it, however little the system takes at a time.

    A call for each image: one call for many (``pwritev``) took four times as long on ext4.
    """
    wrote = os.pwrite(file, data, at)
    while wrote < len(data):
        wrote += os.pwrite(file, memoryview(data)[wrote:], at + wrote)


# --- around them ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"no room for {path} ({error.strerror}): make some, and the same command goes on "
                "from here"
            ) from error
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_bad(store: Store, blocks: list[Block], config: ConvertConfig) -> None:
    bad = [(store.where(index), reason) for block in blocks for index, reason in block.bad]
    images = sum(len(block.rows) for block in blocks)
    if not images:
        raise BadImagesError(f"none of the {len(bad):,} images of {store.root} can be used", bad)
    if bad and not config.skip_bad:
        raise BadImagesError(
            f"{len(bad):,} of {len(bad) + images:,} images of {store.root} are bad: repair them, "
            "which starts anew, or leave them out with --skip-bad, which goes on from here",
            bad,
        )


def _finish(
    store: Store, blocks: list[Block], partial: Path, plan: dict[str, Any], config: ConvertConfig
) -> dict[str, Any]:
    """Write metadata, annex, table and, when all of that is on the disk, the header."""
    rows = np.concatenate([block.rows for block in blocks])
    metadata = np.zeros(len(rows), METADATA)
    for ours, theirs in (("mode", "mode"), ("width", "width"), ("height", "height")):
        metadata["image"][ours] = rows[theirs]
    metadata["image"]["data_ptr"] = rows["start"]
    metadata["label"] = store.labels[rows["source"]]
    table = np.zeros(len(rows), RECORD)
    table["sample_id"] = np.arange(len(rows))
    table["ptr"], table["size"] = rows["start"], rows["size"]
    names = [store.name(index).replace("\0", "_") for index in rows["source"].tolist()]
    about = _about(store, blocks, rows, plan, config)
    about["tables_crc32"] = zlib.crc32(table.tobytes(), zlib.crc32(metadata.tobytes()))
    joined = "\0".join(names).encode("utf-8", "surrogateescape")
    annex = Annex(about, store.classes, rows["crc"].astype(np.uint32), joined).pack()
    annex_start = _align(blocks[-1].end, 8)
    table_start = _align(annex_start + len(annex), 8)
    first = head(
        images=len(rows),
        page_size=page_of(int(rows["size"].max())),
        table=table_start,
        annex=annex,
        annex_start=annex_start,
    )
    with partial.open("r+b") as file:
        file.truncate(table_start)
        file.seek(len(first))
        file.write(metadata.tobytes())
        file.seek(annex_start)
        file.write(annex)
        file.seek(table_start)
        file.write(table.tobytes())
        file.seek(0)
        file.write(first)
    return about


def _about(
    store: Store,
    blocks: list[Block],
    rows: NDArray[np.void],
    plan: dict[str, Any],
    config: ConvertConfig,
) -> dict[str, Any]:
    """Describe the file for the manifest."""
    how: Counter[str] = Counter()
    for block in blocks:
        how.update(block.how)
    shorter = np.minimum(rows["width"], rows["height"])
    counts, _ = np.histogram(shorter, [0, *_SIDES, 2**16])
    edges = itertools.pairwise([0, *_SIDES, 2**16])
    first = np.cumsum([0, *(len(block.rows) for block in blocks)]).tolist()
    return {
        "fastsiam": fastsiam.__version__,
        "source": str(store.root),
        "images": len(rows),
        "classes": len(np.unique(store.labels[rows["source"]])) if store.classes else 0,
        "bytes": int(rows["size"].astype(np.int64).sum()),
        "raw": int((rows["mode"] == RAW).sum()),
        "stored": dict(sorted(how.items())),
        "left_out": [
            {"name": store.name(index), "reason": reason}
            for block in blocks
            for index, reason in block.bad
        ],
        "shorter_sides": {
            f"{low}-{high - 1}": int(count)
            for (low, high), count in zip(edges, counts, strict=True)
            if count
        },
        "options": plan["options"],
        "plan": plan,
        "set": hashlib.sha256(
            json.dumps([plan["source"], asdict(replace(config, **_FOR_ONE_PART))]).encode()
        ).hexdigest(),
        "blocks": [
            {
                "first": first[block.number],
                "images": len(block.rows),
                "start": block.start,
                "bytes": block.end - block.start,
                "crc32": zlib.crc32(block.rows["crc"].tobytes()),
            }
            for block in blocks
        ],
    }


def _align(at: int, unit: int) -> int:
    return at + -at % unit
