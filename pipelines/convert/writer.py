"""Writes a store into one .beton file: in parallel, resumable, the same bytes every time.

The images are cut into blocks of about 8 MiB. A worker reads and prepares a block in memory, learns
where the block before it ended, and writes it there; so no byte passes between processes, and the
file does not depend on how many there are. Each finished block is noted in a journal beside the
partial file. At the end come metadata, annex and table, the header last, and then the real name.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import fastsiam
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError

from ..processes import AbandonedError, forked
from ..store.base import Bytes, Store
from ..store.beton import FIELD, HEADER, METADATA, RAW, RECORD, Annex, BetonStore, head
from .prepare import prepare

BLOCK_BYTES = 2**23
_BLOCK_IMAGES = 4096
_SMALLEST_PAGE, _RAW_PAGE, _LARGEST_PAGE = 2**23, 2**25, 2**31
_SIDES = (32, 64, 128, 224, 256, 384, 512, 1024, 2048)
_FORMAT = 1

_ROW = np.dtype(
    [
        ("source", "<i8"),
        ("start", "<u8"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("width", "<u2"),
        ("height", "<u2"),
        ("mode", "u1"),
    ]
)
"""An image that is written: its place in the source and in the file."""

Progress = Callable[[int, int], None]
"""Called with the images and the source bytes that are done."""


class BadImagesError(DataError):
    """Images of the source are bad; ``bad`` lists each with the reason."""

    def __init__(self, message: str, bad: list[tuple[str, str]]) -> None:
        super().__init__(message)
        self.bad = bad


@dataclass(frozen=True)
class Block:
    """A finished block."""

    number: int
    start: int
    end: int
    rows: NDArray[np.void]
    """(images,) of type _ROW."""
    how: dict[str, int]
    bad: list[tuple[int, str]]
    """Position in the source, and reason."""

    def line(self) -> str:
        """Return it as a line of the journal."""
        rows = base64.b64encode(self.rows.tobytes()).decode()
        values = [self.number, self.start, self.end, rows, self.how, self.bad]
        text = json.dumps(values)
        return f"{zlib.crc32(text.encode()):08x} {text}\n"

    @staticmethod
    def parse(line: str) -> Block:
        """Read a line of the journal; ValueError if it is torn."""
        check, _, text = line.rstrip("\n").partition(" ")
        if f"{zlib.crc32(text.encode()):08x}" != check:
            raise ValueError("torn line")
        number, start, end, rows, how, bad = json.loads(text)
        return Block(
            number,
            start,
            end,
            np.frombuffer(base64.b64decode(rows), _ROW),
            how,
            [(index, reason) for index, reason in bad],
        )


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
    page = _page_size(sizes, config)
    plan = _plan(store, indices, config, page)
    if path.exists():
        about = _finished(path, plan)
        say(f"{path} is there already")
        return about
    partial, journal = (
        path.with_name(f"{path.name}.partial"),
        path.with_name(f"{path.name}.journal"),
    )
    begin = _align(HEADER.itemsize + 2 * FIELD.itemsize + len(indices) * METADATA.itemsize, 4096)
    cuts = _cut(sizes, None if store.groups is None else store.groups[indices])
    with _reporting(path), _locked(journal) as log:
        done = _read_journal(log, plan, partial, say)
        done_images = int(cuts[len(done)])
        done_bytes = int(sizes[:done_images].sum())
        _check_room(path, int(sizes.sum()) - done_bytes, config)
        with partial.open("ab") as file:
            file.truncate(done[-1].end if done else begin)
        _start_journal(log, plan, done)
        job = _Job(store, indices, cuts, config, partial, page, done[-1].end if done else begin)
        job.turn.value = len(done)
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
        about = _finish(store, ordered, partial, page, plan, config)
        os.replace(partial, path)
        journal.unlink()
    return about


def _page_size(sizes: NDArray[np.int64], config: ConvertConfig) -> int:
    """Choose FFCV's page: no record may cross one, or FFCV's own page cache cannot read it."""
    page = _RAW_PAGE if config.raw else _SMALLEST_PAGE
    while page < 2 * int(sizes.max()) and page < _LARGEST_PAGE:
        page *= 2
    return page


def _plan(store: Store, indices: NDArray[np.int64], config: ConvertConfig, page: int) -> str:
    """Return a text that is the same only for the same images and the same treatment."""
    options = [config.max_side, config.short_side, config.quality, config.raw]
    parts = [_FORMAT, store.stamp(), store.classes, zlib.crc32(store.labels.tobytes())]
    parts += [zlib.crc32(indices.tobytes()), options, page]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _finished(path: Path, plan: str) -> dict[str, Any]:
    about = BetonStore(path).about
    if about.get("plan") != plan:
        raise DataError(
            f"{path} exists already and was made of other images or with other options; "
            "delete it or choose another --out"
        )
    return about


def _cut(sizes: NDArray[np.int64], groups: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the first image of every block, and the end: (blocks + 1,)."""
    if groups is None:
        groups = (np.cumsum(sizes) - sizes) // BLOCK_BYTES
    edges = np.concatenate([[0], np.flatnonzero(np.diff(groups)) + 1, [len(sizes)]])
    cuts = [
        np.arange(first, last, _BLOCK_IMAGES) for first, last in itertools.pairwise(edges.tolist())
    ]
    return np.concatenate([*cuts, [len(sizes)]]).astype(np.int64)


def _check_room(path: Path, needed: int, config: ConvertConfig) -> None:
    """Refuse at once what the disk will not hold, as far as that is known beforehand."""
    free = shutil.disk_usage(path.parent).free
    if needed > free and not (config.max_side or config.short_side or config.raw):
        raise DataError(
            f"{path.parent} has {free / 1e9:,.1f} GB free, and {path.name} takes about "
            f"{needed / 1e9:,.1f} GB: make room, choose another --out, or shrink with --max-side"
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
        page: int,
        start: int,
    ) -> None:
        self.store, self.indices, self.cuts = store, indices, cuts
        self.config, self.partial, self.page = config, partial, page
        context = get_context("fork")
        self.changed = context.Condition()
        self.turn: Synchronized[int] = context.Value("q", 0, lock=False)
        self.at: Synchronized[int] = context.Value("q", start, lock=False)
        self.file = -1

    def place(self, number: int, lengths: list[int]) -> tuple[int, list[int], int]:
        """Wait for the block before; return where this one starts, its records, and its end."""
        with self.changed:
            self.changed.wait_for(lambda: self.turn.value in (number, -1))
            if self.turn.value < 0:
                raise AbandonedError
            start = at = self.at.value
            places = []
            for length in lengths:
                if at % self.page + length > self.page:
                    at = _align(at, self.page)
                places.append(at)
                at += length
            self.at.value, self.turn.value = at, number + 1
            self.changed.notify_all()
        return start, places, at

    def fail(self) -> None:
        """Let nobody wait for a block that will not come."""
        with self.changed:
            self.turn.value = -1
            self.changed.notify_all()


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
    first, last = job.cuts[number : number + 2].tolist()
    rows = np.zeros(last - first, _ROW)
    how: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    data: list[Bytes] = []
    for index in job.indices[first:last].tolist():
        try:
            encoded = job.store.read(index)
            record = prepare(encoded, job.store.raw_size(index), job.config)
            if len(record.data) > job.page:
                raise ValueError(
                    f"it takes {len(record.data):,} bytes, more than a page of {job.page:,}; "
                    "shrink it with --max-side"
                )
        except DataError as error:
            if not job.store.root.exists():
                raise DataError(f"{job.store.root} is gone") from error
            bad.append((index, str(error)))
        except (ValueError, MemoryError) as error:
            bad.append((index, str(error) or "it does not fit into memory"))
        else:
            rows[len(data)] = (
                index,
                0,
                len(record.data),
                zlib.crc32(record.data),
                record.width,
                record.height,
                record.mode,
            )
            how[record.how] += 1
            data.append(record.data)
    rows = rows[: len(data)]
    start, places, end = job.place(number, [len(part) for part in data])
    rows["start"] = places
    for at, part in zip(places, data, strict=True):
        _write_all(job.file, part, at)
    return Block(number, start, end, rows, dict(how), bad)


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


@contextlib.contextmanager
def _locked(journal: Path) -> Iterator[IO[str]]:
    """Open the journal for this process alone."""
    with journal.open("a+") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another conversion is writing {journal.stem} at this moment"
            ) from error
        yield log


def _read_journal(
    log: IO[str], plan: str, partial: Path, say: Callable[[str], None]
) -> list[Block]:
    """Return the blocks of an earlier try, up to the first that is missing or not whole."""
    log.seek(0)
    head, lines = log.readline().strip(), list(log)
    if not head or not partial.exists():
        return []
    if head != plan:
        say(f"starting {partial.stem} anew: the source or the options are others than before")
        return []
    blocks = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            block = Block.parse(line)
            blocks[block.number] = block
    whole = itertools.takewhile(lambda number: number in blocks, itertools.count())
    known = [blocks[number] for number in whole]
    with partial.open("rb") as file, ThreadPoolExecutor() as threads:
        checks = list(threads.map(functools.partial(_is_whole, file.fileno()), known))
    done = known[: [*checks, False].index(False)]
    images = sum(len(block.rows) + len(block.bad) for block in done)
    say(f"going on with {partial.stem}: {images:,} images are there and whole")
    return done


def _is_whole(file: int, block: Block) -> bool:
    """Tell whether a block's records have the checksums that were noted."""
    data = memoryview(os.pread(file, block.end - block.start, block.start))
    if len(data) != block.end - block.start:
        return False
    for row in block.rows:
        at = int(row["start"]) - block.start
        if zlib.crc32(data[at : at + int(row["size"])]) != row["crc"]:
            return False
    return True


def _start_journal(log: IO[str], plan: str, done: list[Block]) -> None:
    log.seek(0)
    log.truncate()
    log.write(plan + "\n" + "".join(block.line() for block in done))
    log.flush()


def _refuse_bad(store: Store, blocks: list[Block], config: ConvertConfig) -> None:
    bad = [(store.where(index), reason) for block in blocks for index, reason in block.bad]
    images = sum(len(block.rows) for block in blocks)
    if not images:
        raise BadImagesError(f"none of the {len(bad):,} images of {store.root} can be used", bad)
    if bad and not config.skip_bad:
        raise BadImagesError(
            f"{len(bad):,} of {len(bad) + images:,} images of {store.root} are bad: repair them, "
            "or leave them out with --skip-bad (the work done so far is kept)",
            bad,
        )


def _finish(
    store: Store, blocks: list[Block], partial: Path, page: int, plan: str, config: ConvertConfig
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
    names = [store.name(index) for index in rows["source"].tolist()]
    about = _about(store, blocks, rows, names, plan, config)
    about["tables_crc32"] = zlib.crc32(table.tobytes(), zlib.crc32(metadata.tobytes()))
    joined = "\0".join(names).encode("utf-8", "surrogateescape")
    annex = Annex(about, store.classes, rows["crc"].astype(np.uint32), joined).pack()
    annex_start = _align(blocks[-1].end, 8)
    table_start = _align(annex_start + len(annex), 8)
    first = head(
        images=len(rows),
        page_size=page,
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
    names: list[str],
    plan: str,
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
        "classes": len(store.classes),
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
        "options": {
            "max_side": config.max_side,
            "short_side": config.short_side,
            "quality": config.quality,
            "raw": config.raw,
            "limit": config.limit,
            "part": config.part,
        },
        "seed": config.seed,
        "plan": plan,
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
