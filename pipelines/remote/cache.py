"""A cache on disk for objects of object storage, in chunk files, shared by a machine's processes.

A chunk is fetched whole, by one request, and then read by everybody: ranks, loader processes and
other runs. Its file is written under another name and renamed, so a file with a chunk's name is
complete. Errors of the cache's disk are logged once and never end a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from fastsiam.errors import DataError
from fastsiam.files import explained, others_can_write, why

from . import storage

log = logging.getLogger(__name__)

CHUNK = 2**22
"""Bytes of a chunk, 4 MiB. A shuffle within a window reads blocks of 64 images, 7 MB of ImageNet's:
if its cache is smaller than the data, it fetches 1.6 times their bytes in an epoch. With chunks of
8 MiB it would be 2.1 times, with 32 MiB 5.6 times. Smaller ones cost more requests."""
_FORMAT, _LOCK = "chunks-1", "lock"
_CLAIM, _PART = ".claim", ".part"
_PATIENCE = 5.0
"""Seconds to wait for another process that adds a chunk."""
_LOOK, _LONGEST_WAIT = 0.05, 30.0
"""Seconds: how often, and for how long, to look for a chunk that another process fetches."""
_LEFT = 0.95
"""Share of the limit that is left when the cache was full."""
_STEP = 1 / 64
"""Share of the limit that a process adds before it counts again what all processes have added."""


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
        gigabytes: 10^9 bytes that the chunks take at most; several processes may each exceed it by
            a 64th. If they use several limits for one folder, each keeps to its own.

    Raises:
        DataError: another user can write into the folder, or it cannot be created.
    """

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self.folder = folder.expanduser().absolute() / _FORMAT
        self._most, self._room = int(gigabytes * 1e9), 0
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
        claim = self.folder / f"{chunk.name}{_CLAIM}"
        while self.keeps and not self.has(chunk):
            if _is_claimed(claim):
                await asyncio.sleep(_LOOK)
                continue
            async with storage.chunks_in_memory():
                if not self.keeps or self.has(chunk):  # since this process waited for its turn
                    return
                try:
                    os.close(os.open(claim, os.O_CREAT | os.O_EXCL, 0o600))
                except FileExistsError:
                    continue
                except OSError as error:
                    return self._give_up(error)
                try:
                    return await asyncio.to_thread(self._keep, chunk, await get())
                finally:
                    claim.unlink(missing_ok=True)

    def _keep(self, chunk: Chunk, data: memoryview) -> None:
        """Write a chunk to its file; other chunks make room."""
        part = self.folder / f"{chunk.name}.{secrets.token_hex(4)}{_PART}"
        try:
            with FileLock(self.folder / _LOCK, timeout=_PATIENCE, poll_interval=0.002):
                if self._room < len(data):
                    self._room = self._make_room(len(data))
                if self._room < len(data):
                    return
                self._room -= len(data)
                part.write_bytes(data)
                part.rename(self.folder / chunk.name)
        except Timeout:
            pass
        except OSError as error:
            self._give_up(error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        """Add no more chunks, and log why."""
        if self.keeps:
            self.keeps = False
            log.warning(
                f"the cache {self.folder.parent} cannot be written ({why(error)}): nothing more is "
                "kept in it"
            )

    def _make_room(self, needed: int) -> int:
        """Remove the chunks that were not used for longest, if that is needed.

        Returns:
            The bytes that may be added before this is called again.
        """
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # a user may remove files
                if path.suffix == _PART:  # of a process that was killed: this one has the lock
                    path.unlink()
                elif not path.suffix and "-" in path.name:
                    facts = path.stat()
                    found.append((facts.st_mtime_ns, facts.st_size, path))
        used = sum(size for _, size, _ in found)
        if used + needed > self._most:
            for _, size, path in sorted(found):
                if used + needed <= self._most * _LEFT:
                    break
                path.unlink(missing_ok=True)
                used -= size
        return min(self._most - used, max(needed, int(self._most * _STEP)))


def _is_claimed(claim: Path) -> bool:
    """Tell whether another process fetches a chunk: one that was killed or stopped does not."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - claim.stat().st_mtime <= _LONGEST_WAIT:
            return True
        claim.unlink()
    return False
