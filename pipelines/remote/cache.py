"""A cache on disk for objects of object storage, in chunk files, shared by a machine's processes.

A chunk is fetched whole, by one request, and then read by everybody: ranks, loader processes and
other runs. Its file is written under another name and renamed, so a file with a chunk's name is
complete. Errors of the cache's disk are logged once and never end a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from fastsiam.caches import others_can_write
from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.files import explained, why

log = logging.getLogger(__name__)

CHUNK = 2**22
"""Bytes of a chunk, 4 MiB. A shuffle within a window reads blocks of 64 images, 7 MB of ImageNet's:
if its cache is smaller than the data, it fetches 1.6 times their bytes in an epoch. With chunks of
8 MiB it would be 2.1 times, with 32 MiB 5.6 times. Smaller ones cost more requests."""
_FORMAT = "chunks-1"
_FORMER = "fastsiam-1"
"""Folder of the cache of version 0.2."""
_PART = ".part"
_PATIENCE = 5.0
"""Seconds to wait for another process that keeps a chunk."""
_LEFT = 0.95
"""Share of the limit that is left when the cache was full."""


class Chunk(NamedTuple):
    """A piece of one version of an object."""

    name: str
    """Of its file."""
    start: int
    """Where in the object it begins."""
    stop: int


def version(url: str, tag: str, size: int) -> str:
    """Return a name for one version of an object.

    Args:
        url: address of the object; a password or a signature in it is left out.
        tag: changes with the object's content: its ETag and time of change.
        size: bytes of the object.
    """
    parts = urlsplit(url)
    text = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}\n{tag}\n{size}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def chunks(version: str, size: int, start: int, stop: int) -> list[Chunk]:
    """Return the chunks that hold a range of an object.

    Args:
        version: of the object.
        size: bytes of the object.
        start: first byte of the range.
        stop: the byte after its last one.
    """
    return [
        Chunk(f"{version}-{first // CHUNK:06}", first, min(first + CHUNK, size))
        for first in range(start - start % CHUNK, stop, CHUNK)
    ]


class Cache:
    """Chunks of objects, kept in a folder. A pickle of it opens the same folder.

    Args:
        folder: created if it does not exist; the chunks lie in a folder within.
        gigabytes: 10^9 bytes that the chunks take at most. If processes use several limits for one
            folder, each keeps to its own when it writes.

    Raises:
        DataError: another user can write into the folder, or it cannot be created.
    """

    def __init__(self, folder: Path, gigabytes: float) -> None:
        whole = folder.expanduser().absolute()
        self.folder, self._most = whole / _FORMAT, int(gigabytes * 1e9)
        self.keeps = True
        """Whether chunks are added; those that are there are read in any case."""
        if reason := others_can_write(self.folder):
            raise DataError(
                f"images would be read from the cache {folder}, but {reason}: take it into your "
                "own hands, or choose another --cache"
            )
        with explained(DataError, f"cannot make the cache {folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (whole / _FORMER / "index").exists():
            shutil.rmtree(whole / _FORMER, ignore_errors=True)
            log.info(f"removed {whole / _FORMER}, a cache in the format of version 0.2")

    def has(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is there; if so, it counts as used just now."""
        path = self.folder / chunk.name
        try:
            if path.stat().st_size == chunk.stop - chunk.start:
                os.utime(path)
                return True
            path.unlink()  # something cut it off
        except OSError:
            pass
        return False

    def read(self, chunk: Chunk, start: int, into: memoryview) -> bool:
        """Read bytes of a chunk from a place in the object on; tell whether they were there."""
        try:
            file = os.open(self.folder / chunk.name, os.O_RDONLY)
        except OSError:
            return False
        try:
            return os.preadv(file, [into], start - chunk.start) == len(into)
        except OSError:
            return False
        finally:
            os.close(file)

    def claim(self, chunk: Chunk) -> int | None:
        """Claim a chunk, so that no other process fetches it, until ``keep`` or ``release``.

        Returns:
            The file to write it to; None if another process has claimed it, or has just kept it.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self.folder / f"{chunk.name}{_PART}"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(file) and _is_at(file, path):
            if not self.has(chunk):
                return file
            self.release(chunk, file)
        else:
            os.close(file)
        return None

    def keep(self, chunk: Chunk, file: int, data: memoryview) -> None:
        """Write a chunk and release it; chunks that were not used for longest make room.

        Args:
            chunk: that was claimed.
            file: what ``claim`` returned.
            data: its bytes.
        """
        try:
            with self._usage() as usage:
                used = _number(os.pread(usage, 32, 0))
                if used is None or used + len(data) > self._most:
                    used = self._make_room(len(data))
                if used + len(data) > self._most:
                    return
                # The sum is written first: if this process is killed, it is too high, not too low.
                os.pwrite(usage, f"{used + len(data):<32}".encode(), 0)
                os.ftruncate(file, 0)
                _write(file, data)
                path = self.folder / chunk.name
                os.rename(f"{path}{_PART}", path)
        except OSError as error:
            self.give_up(error)
        finally:
            self.release(chunk, file)

    def release(self, chunk: Chunk, file: int) -> None:
        """End a claim; another process may fetch the chunk if it was not kept."""
        path = self.folder / f"{chunk.name}{_PART}"
        with contextlib.suppress(OSError):
            if _is_at(file, path):
                path.unlink()
        os.close(file)

    def give_up(self, error: OSError) -> None:
        """Add no more chunks, and log why."""
        if self.keeps and not isinstance(error, TimeoutError):
            self.keeps = False
            log.warning(
                f"the cache {self.folder.parent} cannot be written ({why(error)}): nothing more is "
                "kept in it"
            )

    @contextlib.contextmanager
    def _usage(self) -> Iterator[int]:
        """Open the file that tells how many bytes all chunks take; one process at a time."""
        file = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(file, _PATIENCE):
                raise TimeoutError
            yield file
        finally:
            os.close(file)

    def _make_room(self, needed: int) -> int:
        """Remove the chunks that were not used for longest; return the bytes of those left."""
        found = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith(_PART):
                self._remove_abandoned(Path(entry.path))
            elif entry.name != "usage":
                with contextlib.suppress(FileNotFoundError):  # a user may remove files
                    facts = entry.stat()
                    found.append((facts.st_mtime_ns, facts.st_size, Path(entry.path)))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used + needed <= self._most * _LEFT:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used

    def _remove_abandoned(self, part: Path) -> None:
        """Remove what a process that was killed has left."""
        with contextlib.suppress(OSError):
            file = os.open(part, os.O_RDWR)
            try:
                if _lock(file) and _is_at(file, part):
                    part.unlink()
            finally:
                os.close(file)


def _lock(file: int, seconds: float = 0) -> bool:
    """Lock an open file for this process alone; tell whether that was possible in time."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)


def _number(text: bytes) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _is_at(file: int, path: Path) -> bool:
    """Tell whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _write(file: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(file, data[at:], at)


@contextlib.contextmanager
def cached(data: DataConfig) -> Iterator[Cache | None]:
    """Have remote files that are opened inside keep what they read by a run's settings.

    Raises:
        DataError: the cache cannot be used; see ``Cache``.
    """
    global _current
    before = _current
    _current = Cache(Path(data.cache), data.cache_gb) if data.cache else None
    try:
        yield _current
    finally:
        _current = before


def current_cache() -> Cache | None:
    """Return the cache of files that are opened now, if there is one."""
    return _current


_current: Cache | None = None
