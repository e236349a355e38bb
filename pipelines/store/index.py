"""Indexes of the images in a set of files, built once and stored on disk.

An index is an .npz file of named arrays. It is stored next to the files or, if that is impossible,
in the user's cache folder. It is valid as long as the names, sizes and modification times of the
files match those that it contains.
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
from fastsiam.files import atomic_write, os_errors_as

from ..remote.path import Place
from .mapped_files import File

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
"""Index row of an image: its byte range and file, label, size in pixels and ``Flags``."""
_FORMAT = 3
"""Version of the format; stored with the facts and a null, where fastsiam 0.2 had more data."""
_MOST_FILES = 0xFFFF
"""An index row stores the file number in 16 bits."""

Facts = list[list[str | int]]
"""Name, size in bytes and modification time (ns) of each file, to detect changes."""

Index = dict[str, NDArray[Any]]
"""Named arrays; always contains ``rows``: (images,) of type ROW."""


def open_index(files: Sequence[File], build: Callable[[str], Index], *columns: str) -> Index:
    """Load the index of files, or build and store it if it is missing or outdated.

    Args:
        files: the files to index.
        build: builds the index, given a description of the files for messages.
        columns: the indexed columns, if not the default; an index of others is outdated.

    Raises:
        DataError: there are too many files, one no longer exists, or ``build`` raised it.
    """
    if len(files) > _MOST_FILES:
        raise DataError(
            f"{len(files):,} files are more than the {_MOST_FILES:,} that can be indexed"
        )
    paths = [file.path for file in files]
    source, facts, places = source_name(paths), file_facts(paths), homes(paths)
    facts += [[column] for column in columns]
    if (index := load(places, facts)) is not None:
        return index
    with _locked(places, source):
        if (index := load(places, facts)) is not None:  # built by another process
            return index
        start = time.monotonic()
        index = build(source)
        home = keep(index, places, facts)
        log.info(
            f"indexed {len(index['rows']):,} images in {source} in "
            f"{time.monotonic() - start:.1f} s ({f'kept in {home}' if home else 'not kept'})"
        )
        return index


@contextlib.contextmanager
def _locked(homes: Sequence[Path], source: str) -> Iterator[None]:
    """Lock an index inside a ``with`` block, so that one process builds it and the others wait.

    The lock is a file next to the first writable home. Without a writable home, nothing is locked.
    """
    with contextlib.ExitStack() as stack:
        for home in homes:
            lock = FileLock(home.with_name(f"{home.name}.lock"), fallback_to_soft=False)
            with contextlib.suppress(OSError):  # read-only, or without file locks
                home.parent.mkdir(parents=True, exist_ok=True)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    log.info(f"waiting for another process to index {source}")
                    lock.acquire()
                stack.callback(_release, lock)
                break
        yield


def _release(lock: FileLock) -> None:
    with contextlib.suppress(OSError):
        os.unlink(lock.lock_file)  # before the release, so that waiting processes notice
    lock.release()


def source_name(paths: Sequence[Place]) -> str:
    """Return the name of a set of files, for messages."""
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {paths[0].parent}"


def file_facts(paths: Sequence[Place]) -> Facts:
    """Return the name, size and modification time of each file.

    Raises:
        DataError: a file no longer exists.
    """
    facts: Facts = []
    for path in paths:
        with os_errors_as(DataError, f"cannot read {path}"):
            status = path.stat()
        facts.append([path.name, status.st_size, status.st_mtime_ns])
    return facts


def fingerprint(paths: Sequence[Place], *columns: str, rows: bytes = b"") -> str:
    """Return a fingerprint of files (names, sizes, modification times) and of what is read.

    That is the named ``columns``, if they are not the default, or the ``rows`` of the files' index.
    """
    facts = json.dumps([*file_facts(paths), *columns])
    return hashlib.sha256(facts.encode() + rows).hexdigest()


def homes(paths: Sequence[Place]) -> list[Path]:
    """Return the paths where the index of these files may be stored, in order of preference.

    These are a file next to local files, and a file in the user's cache folder.
    """
    first, names = paths[0], [path.name for path in paths]
    stem = first.stem if len(paths) == 1 else f"{first.stem}-and-{len(paths) - 1}-more"
    candidates = []
    if isinstance(first, Path):
        candidates.append(first.parent / f".{stem}.fastsiam-index")
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
        key = hashlib.sha256(json.dumps([str(first.parent.resolve()), names]).encode()).hexdigest()
        candidates.append(cache / "fastsiam" / f"{key[:16]}.index")
    return candidates


def load(homes: Sequence[Path], facts: Facts) -> Index | None:
    """Load the first readable index at these paths with the given facts, or return None."""
    for home in homes:
        with contextlib.suppress(Exception):  # numpy can raise any exception on a corrupt file
            with np.load(home) as file:
                index = {name: file[name] for name in file.files}
            metadata = json.loads(index.pop("about").tobytes())
            if metadata == [_FORMAT, facts, None] and index["rows"].dtype == ROW:
                return index
    return None


def keep(index: Index, homes: Sequence[Path], facts: Facts) -> Path | None:
    """Store the index at the first writable path, and return the path; None if none is writable."""
    for home in homes:
        try:
            metadata = np.frombuffer(json.dumps([_FORMAT, facts, None]).encode(), np.uint8)
            with (
                atomic_write(home, by_many=True) as temporary,  # possibly all ranks of a run
                temporary.open("wb") as file,
            ):
                np.savez(file, about=metadata, **index)  # type: ignore[arg-type]
        except OSError:  # read-only or full
            continue
        return home
    return None


def pack_texts(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Compress texts into a (bytes,) uint8 array: image names are long and rarely needed."""
    joined = "".join(text.replace("\0", "_") + "\0" for text in texts)
    return np.frombuffer(zlib.compress(joined.encode("utf-8", "surrogateescape"), 1), np.uint8)


def unpack_texts(array: NDArray[np.uint8]) -> list[str]:
    """Return the texts of an array from ``pack_texts``."""
    return str(zlib.decompress(array.tobytes()), "utf-8", "surrogateescape").split("\0")[:-1]
