"""The index of a set of files: where images lie in them. It is built once, and then kept.

An index is an .npz file of named arrays. It is kept beside the files or, where that is impossible,
in the user's cache, and is valid while the files have the names, sizes and times that it notes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import explained, written_whole

from ..remote.path import Place
from .files import File

log = logging.getLogger(__name__)

ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("label", "<i4"),
        ("file", "<u2"),
        ("width", "<u2"),
        ("height", "<u2"),
        ("flags", "<u2"),
    ]
)
"""An image of an index: where its bytes are, its class, its size in pixels, ``Flags``."""
_FORMAT = 3
"""Noted with the facts, and with null, where version 0.2 had more."""
_MOST_FILES = 0xFFFF
"""A row has two bytes for the number of its file."""

Facts = list[list[str | int]]
"""Of each file name, size and modification time (ns), which change when it does."""


Index = dict[str, NDArray[Any]]
"""Named arrays; ``rows`` (images,) of type ROW is always there."""


def open_index(files: Sequence[File], build: Callable[[str], Index], *, column: str = "") -> Index:
    """Load the index of files; if it is missing or of other files, build and keep it.

    Args:
        files: what is indexed.
        build: makes the index; gets the files' names, for messages.
        column: what of the files is indexed, where that is not always the same.

    Raises:
        DataError: there are too many files, one is gone, or as ``build``.
    """
    if len(files) > _MOST_FILES:
        raise DataError(
            f"{len(files):,} files are more than the {_MOST_FILES:,} that can be indexed"
        )
    paths = [file.path for file in files]
    source = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {paths[0].parent}"
    facts, places = file_facts(paths), homes(paths)
    if column:
        facts.append([column])
    if (index := load(places, facts)) is not None:
        return index
    with _locked(places, source):
        if (index := load(places, facts)) is not None:  # another process built it meanwhile
            return index
        began = time.monotonic()
        index = build(source)
        kept = keep(index, places, facts)
        log.info(
            f"indexed {len(index['rows']):,} images in {source} in "
            f"{time.monotonic() - began:.1f} s ({f'kept in {kept}' if kept else 'not kept'})"
        )
        return index


@contextlib.contextmanager
def _locked(homes: Sequence[Path], source: str) -> Iterator[None]:
    """Lock an index inside a ``with`` block: only one process builds it, and the others wait.

    The lock is a file beside the first place that takes one. If no place does, nothing is locked.
    """
    with contextlib.ExitStack() as stack:
        for home in homes:
            lock = FileLock(home.with_name(f"{home.name}.lock"), fallback_to_soft=False)
            with contextlib.suppress(OSError):  # a read-only place, or one without locks
                home.parent.mkdir(parents=True, exist_ok=True)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    log.info(f"waiting for another process, which indexes {source}")
                    lock.acquire()
                stack.callback(_release, lock)
                break
        yield


def _release(lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)  # before the release, so that waiting processes notice
    lock.release()


def file_facts(paths: Sequence[Place]) -> Facts:
    """Return the facts of each file.

    Raises:
        DataError: a file is not there any more.
    """
    facts: Facts = []
    for path in paths:
        with explained(DataError, f"cannot read {path}"):
            found = path.stat()
        facts.append([path.name, found.st_size, found.st_mtime_ns])
    return facts


def homes(paths: Sequence[Place]) -> list[Path]:
    """Return where the index of these files may be kept: beside them, or in the user's cache.

    Beside those of another machine nothing is written.
    """
    first, names = paths[0], [path.name for path in paths]
    stem = first.stem if len(paths) == 1 else f"{first.stem}-and-{len(paths) - 1}-more"
    found = []
    if isinstance(first, Path):
        found.append(first.parent / f".{stem}.fastsiam-index")
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
        key = hashlib.sha256(json.dumps([str(first.parent.resolve()), names]).encode()).hexdigest()
        found.append(cache / "fastsiam" / f"{key[:16]}.index")
    return found


def load(homes: Sequence[Path], facts: Facts) -> Index | None:
    """Read the first whole index in one of these places that is of files with these facts."""
    for home in homes:
        with contextlib.suppress(Exception):  # a damaged archive makes numpy raise anything
            with np.load(home) as file:
                index = {name: file[name] for name in file.files}
            about = json.loads(index.pop("about").tobytes())
            if about == [_FORMAT, facts, None] and index["rows"].dtype == ROW:
                return index
    return None


def keep(index: Index, homes: Sequence[Path], facts: Facts) -> Path | None:
    """Write the index to the first place that takes it, and return that; None if none does."""
    for home in homes:
        try:
            about = np.frombuffer(json.dumps([_FORMAT, facts, None]).encode(), np.uint8)
            with (
                written_whole(home, by_many=True) as temporary,  # all ranks of a run at once
                temporary.open("wb") as file,
            ):
                np.savez(file, about=about, **index)  # type: ignore[arg-type]
        except OSError:  # a read-only place, or a full one
            continue
        return home
    return None


def pack_texts(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Return texts as a compressed array: names are long, and seldom wanted."""
    joined = "".join(text.replace("\0", "_") + "\0" for text in texts)
    return np.frombuffer(zlib.compress(joined.encode("utf-8", "surrogateescape"), 1), np.uint8)


def unpack_texts(array: NDArray[np.uint8]) -> list[str]:
    """Return the texts of an array that ``pack_texts`` made."""
    return str(zlib.decompress(array.tobytes()), "utf-8", "surrogateescape").split("\0")[:-1]
