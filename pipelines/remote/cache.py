"""A cache on disk for objects of object storage, in chunk files, shared by a machine's processes.

A chunk is fetched whole, by one request, and then read by everybody: ranks, loader processes and
other runs. Its file is written under another name and renamed, so a file with a chunk's name is
complete. Errors of the cache's disk are logged once and never end a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.files import explained, others_can_write, why, write_at

log = logging.getLogger(__name__)

CHUNK = 2**22
"""Bytes of a chunk, 4 MiB. A shuffle within a window reads blocks of 64 images, 7 MB of ImageNet's:
if its cache is smaller than the data, it fetches 1.6 times their bytes in an epoch. With chunks of
8 MiB it would be 2.1 times, with 32 MiB 5.6 times. Smaller ones cost more requests."""
_FORMAT = "chunks-1"
_PART, _USAGE = ".part", "usage"
_PATIENCE = 5.0
"""Seconds to wait for another process that writes a chunk."""
_FIRST_LOOK, _LONGEST_LOOK, _LONGEST_WAIT = 0.02, 0.25, 30.0
"""Seconds: how often, and for how long, to look for a chunk that another process fetches."""
_LEFT = 0.95
"""Share of the limit that is left when the cache was full."""


class Chunk(NamedTuple):
    """A piece of one version of an object."""

    name: str
    """Of its file."""
    start: int
    """Where in the object it begins."""
    stop: int


def chunks(version: str, size: int, start: int, stop: int) -> list[Chunk]:
    """Return the chunks that hold the bytes from ``start`` to ``stop`` of a version of an object.

    Args:
        version: a name that no other object and no other version of it has.
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
        self.folder = folder.expanduser().absolute() / _FORMAT
        self._most = int(gigabytes * 1e9)
        self.keeps = True
        """Whether chunks are added; those that are there are read in any case."""
        if reason := others_can_write(self.folder):
            raise DataError(
                f"images would be read from the cache {folder}, but {reason}: take it into your "
                "own hands, or choose another --cache"
            )
        with explained(DataError, f"cannot make the cache {folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

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
            with (self.folder / chunk.name).open("rb", buffering=0) as file:
                file.seek(start - chunk.start)
                return file.readinto(into) == len(into)
        except OSError:
            return False

    async def fetch(self, chunk: Chunk, get: Callable[[], Awaitable[memoryview]]) -> None:
        """Keep a chunk, or wait until another process has done so.

        Args:
            chunk: that is not there.
            get: fetches its bytes.
        """
        part, pause, waited = self.folder / f"{chunk.name}{_PART}", _FIRST_LOOK, 0.0
        while self.keeps and not self.has(chunk) and waited < _LONGEST_WAIT:
            try:
                file = _locked(part)
            except OSError as error:
                return self._give_up(error)
            if file is None:  # another process fetches it
                await asyncio.sleep(pause)
                pause, waited = min(1.5 * pause, _LONGEST_LOOK), waited + pause
                continue
            if self.has(chunk):  # another process kept it just now
                return _remove(part, file)
            try:
                data = await get()
            except BaseException:
                _remove(part, file)
                raise
            return await asyncio.to_thread(self._keep, chunk, part, file, data)

    def _keep(self, chunk: Chunk, part: Path, file: int, data: memoryview) -> None:
        """Write a chunk to its locked file, and unlock it; other chunks make room."""
        usage = None
        try:
            # This file tells how many bytes all chunks take.
            usage = _locked(self.folder / _USAGE, _PATIENCE)
            if usage is None:
                return
            text = os.pread(usage, 32, 0).strip()
            used = int(text) if text.isdigit() else self._most
            if used + len(data) > self._most:
                used = self._make_room(len(data))
            if used + len(data) > self._most:
                return
            # The sum is written first: if this process is killed, it is too high, not too low.
            os.pwrite(usage, f"{used + len(data):<32}".encode(), 0)
            os.ftruncate(file, 0)
            write_at(file, data, 0)
            os.rename(part, self.folder / chunk.name)
        except OSError as error:
            self._give_up(error)
        finally:
            if usage is not None:
                os.close(usage)
            _remove(part, file)

    def _give_up(self, error: OSError) -> None:
        """Add no more chunks, and log why."""
        if self.keeps:
            self.keeps = False
            log.warning(
                f"the cache {self.folder.parent} cannot be written ({why(error)}): nothing more is "
                "kept in it"
            )

    def _make_room(self, needed: int) -> int:
        """Remove the chunks that were not used for longest; return the bytes of those left."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # a user may remove files
                if path.suffix != _PART and path.name != _USAGE:
                    facts = path.stat()
                    found.append((facts.st_mtime_ns, facts.st_size, path))
                elif path.suffix == _PART and (file := _locked(path)) is not None:
                    _remove(path, file)  # a process that was killed has left it
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used + needed <= self._most * _LEFT:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used


def _locked(path: Path, seconds: float = 0) -> int | None:
    """Open a file, which need not be there, and lock it for this process alone.

    Returns:
        The open file; None if another process has locked it for so many seconds, or removed it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, file)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    return None
                time.sleep(0.002)
        if _is_at(file, path):
            stack.pop_all()
            return file
    return None


def _remove(path: Path, file: int) -> None:
    """Remove a file that is locked, if it is still there, and unlock it."""
    with contextlib.suppress(OSError):
        if _is_at(file, path):
            path.unlink()
    os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Tell whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


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
