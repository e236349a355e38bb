"""Writes images of a store into one .beton file: in parallel, resumable, the same bytes every time.

Workers write blocks of about 8 MiB to a partial file, and a journal beside it records each finished
block. Metadata, annex and table follow, then the header, and at last the file gets its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.files import reason

from ..processes import forked
from ..store import Store
from ..store.beton import METADATA, RECORD
from . import blocks, journal, layout
from .journal import Block
from .manifest import check_existing, describe, plan_of

Progress = Callable[[int, int], None]
"""Called with the number of images and source bytes that are done."""


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
    """Write images of a store to a .beton file, or resume an earlier start.

    Args:
        store: the source.
        indices: (images,) the images to convert, in order.
        path: the file; it gets this name when it is complete.
        config: options of the conversion.
        say: for messages, such as how many images an earlier start wrote.
        progress: called at the start and for each block.

    Returns:
        The description of the file, for the manifest.

    Raises:
        BadImagesError: some images are bad and ``config.skip_bad`` is off.
        DataError: the source cannot be read, or the file not be written.
    """
    sizes = store.sizes()[indices]
    plan = plan_of(store, indices, config)
    partial = path.with_name(f"{path.name}.partial")
    journal_path = path.with_name(f"{path.name}.journal")
    edges = layout.block_edges(sizes, None if store.groups is None else store.groups[indices])
    with _explained(path), journal.locked(journal_path) as log:
        if path.exists():
            about = check_existing(path, plan)
            partial.unlink(missing_ok=True)
        else:
            start = layout.first_image(len(indices))
            done = journal.resume(log, plan, partial, start, say)
            start = done[-1].end if done else start
            _warn_of_full_disk(path, int(sizes[edges[len(done)] :].sum()), say)
            job = blocks.Job(store, indices, edges, config, partial, len(done), start)
            _write_blocks(job, done, log, sizes, progress)
            _check_bad(store, done, config)
            about = _finish(store, done, partial, plan)
            os.replace(partial, path)
        journal_path.unlink(missing_ok=True)
    return about


def _write_blocks(
    job: blocks.Job,
    done: list[Block],
    log: IO[bytes],
    sizes: NDArray[np.int64],
    progress: Progress,
) -> None:
    """Write the missing blocks, and append each to ``done`` and the journal, in order."""
    images = int(job.edges[len(done)])
    size = int(sizes[:images].sum())
    progress(images, size)
    pending: dict[int, Block] = {}
    remote = job.store.is_remote
    with forked(job.config.workers, blocks.begin, job, forks=not remote) as run:
        for block in run(blocks.write_block, range(len(done), len(job.edges) - 1)):
            pending[block.number] = block
            while len(done) in pending:
                done.append(pending.pop(len(done)))
                log.write(done[-1].line())
            log.flush()
            first, last = job.edges[block.number : block.number + 2]
            images += int(last - first)
            size += int(sizes[first:last].sum())
            progress(images, size)


def _warn_of_full_disk(path: Path, needed: int, say: Callable[[str], None]) -> None:
    """Warn if the disk has less free space than the source's bytes; encoding may need less."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        say(
            f"{path.parent} has {free / 1e6:,.0f} MB free and {path.name} may take "
            f"{needed / 1e6:,.0f} MB; if the disk fills up, free space and run the same command "
            "again to resume"
        )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise a DataError that says why a file cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"no space for {path} ({error.strerror}): free some, and run the same command "
                "again to resume"
            ) from error
        raise DataError(f"cannot write {path}: {reason(error)}") from error


def _check_bad(store: Store, done: list[Block], config: ConvertConfig) -> None:
    """Raise BadImagesError if bad images are not to be left out, or if all are bad."""
    bad = [(store.where(index), reason) for block in done for index, reason in block.bad]
    images = sum(len(block.rows) for block in done)
    if not images:
        raise BadImagesError(f"none of the {len(bad):,} images of {store.root} can be used", bad)
    if bad and not config.skip_bad:
        raise BadImagesError(
            f"{len(bad):,} of {len(bad) + images:,} images of {store.root} are bad: repair them, "
            "which starts over, or leave them out with --skip-bad, which resumes from here",
            bad,
        )


def _finish(store: Store, done: list[Block], partial: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Write metadata, annex and table, then the header; return the file's description."""
    rows = np.concatenate([block.rows for block in done])
    metadata = np.zeros(len(rows), METADATA)
    for field in ("mode", "width", "height"):
        metadata["image"][field] = rows[field]
    metadata["image"]["data_ptr"] = rows["start"]
    metadata["label"] = store.labels[rows["source"]]
    table = np.zeros(len(rows), RECORD)
    table["sample_id"] = np.arange(len(rows))
    table["ptr"], table["size"] = rows["start"], rows["size"]
    about = describe(store, done, plan, zlib.crc32(table.tobytes(), zlib.crc32(metadata.tobytes())))
    names = "\0".join(store.name(index).replace("\0", "_") for index in rows["source"].tolist())
    joined = names.encode("utf-8", "surrogateescape")
    annex = layout.pack_annex(about, store.classes, rows["crc"].astype(np.uint32), joined)
    annex_start = layout.aligned(done[-1].end, 8)
    table_start = layout.aligned(annex_start + len(annex), 8)
    header = layout.head(
        images=len(rows),
        page_size=layout.page_size(int(rows["size"].max())),
        table=table_start,
        annex=annex,
        annex_start=annex_start,
    )
    with partial.open("r+b") as file:
        file.truncate(table_start)
        for offset, data in (
            (len(header), metadata.tobytes()),
            (annex_start, annex),
            (table_start, table.tobytes()),
            (0, header),
        ):
            file.seek(offset)
            file.write(data)
    return about
