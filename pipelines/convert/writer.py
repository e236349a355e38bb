"""Writes a store into one .beton file: in parallel, resumable, the same bytes every time.

The images are cut into blocks of about 8 MiB. A worker reads and prepares a block in memory, learns
where the block before it ended, and writes it there; so no byte passes between processes, and the
file does not depend on how many there are. Each finished block is noted in a journal beside the
partial file. At the end come metadata, annex and table, the header last, and then the real name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
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
from . import blocks, journal, layout
from .finish import finish
from .journal import Block
from .plan import finished, planned

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
    plan = planned(store, indices, config)
    partial = path.with_name(f"{path.name}.partial")
    cuts = layout.cut(sizes, None if store.groups is None else store.groups[indices])
    with _reporting(path), journal.locked(path.with_name(f"{path.name}.journal")) as log:
        if path.exists():
            about = finished(path, plan)
            _forget(partial, Path(log.name))
            return about
        done = journal.read(log, plan, partial, say)
        start = done[-1].end if done else layout.first_record(len(indices))
        journal.start(log, plan, partial, start, anew=not done)
        _check_room(path, int(sizes[cuts[len(done)] :].sum()), say)
        job = blocks.Job(store, indices, cuts, config, partial, len(done), start)
        ordered = _write_missing(job, done, log, sizes, progress)
        _refuse_bad(store, ordered, config)
        about = finish(store, ordered, partial, plan, config)
        os.replace(partial, path)
        _forget(Path(log.name))
    return about


def _write_missing(
    job: blocks.Job,
    done: list[Block],
    log: IO[str],
    sizes: NDArray[np.int64],
    progress: Progress,
) -> list[Block]:
    """Write the blocks that are missing and note each in the journal.

    Args:
        job: what is written.
        done: the first blocks, of an earlier try.
        log: the journal.
        sizes: (images,) bytes of each in the source.
        progress: called at the beginning, and as blocks are done.

    Returns:
        All blocks, in order.
    """
    images = int(job.cuts[len(done)])
    size = int(sizes[:images].sum())
    progress(images, size)
    written = {block.number: block for block in done}
    with forked(job.config.workers, blocks.begin, job, forks=not job.store.is_remote) as run:
        for block in run(blocks.write_block, range(len(done), len(job.cuts) - 1)):
            log.write(block.line())
            log.flush()
            written[block.number] = block
            first, last = job.cuts[block.number : block.number + 2]
            images += int(last - first)
            size += int(sizes[first:last].sum())
            progress(images, size)
    return [written[number] for number in range(len(job.cuts) - 1)]


def _forget(*files: Path) -> None:
    """Remove files of an earlier try that are needed no more."""
    for file in files:
        file.unlink(missing_ok=True)


def _check_room(path: Path, needed: int, say: Callable[[str], None]) -> None:
    """Say beforehand what the disk may not hold; encoding can make it less."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        say(
            f"{path.parent} has {free / 1e6:,.0f} MB free and {path.name} may take "
            f"{needed / 1e6:,.0f} MB; should the disk be full, the same command goes on later"
        )


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
        raise DataError(f"cannot write {path}: {reason(error)}") from error


def _refuse_bad(store: Store, blocks: list[Block], config: ConvertConfig) -> None:
    """Raise BadImagesError if images are bad and not to be left out, or if all are bad."""
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
