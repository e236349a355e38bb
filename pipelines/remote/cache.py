"""Disk cache for remote objects, in chunk files that all processes of a machine share.

A chunk is fetched by one request. Then all ranks, loader processes and other runs can read it. Its
file is written under a temporary name and renamed, so every file with a chunk's name is complete.
Errors of the cache's disk are logged once and never end a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from fastsiam.errors import DataError
from fastsiam.files import create_private_folder, expand_home, os_errors_as, others_can_write, why

from . import storage

log = logging.getLogger(__name__)

CHUNK = 2**22
"""Bytes of a chunk, 4 MiB. A shuffle within a window reads blocks of 64 images, 7 MB for ImageNet.
With a cache smaller than the data, an epoch then fetches 1.6 times the data. With chunks of 8 MiB
it would be 2.1 times, with 32 MiB 5.6 times. Smaller chunks cost more requests."""
_FORMAT, _LOCK = "chunks-1", "lock"
_CLAIM, _PART = ".claim", ".part"
_PATIENCE = 5.0
"""Seconds to wait for the lock while another process adds a chunk."""
_POLL_SECONDS, _LONGEST_WAIT = 0.05, 30.0
"""Polling interval, in seconds, for a chunk that another process is fetching, and the time after
which the claim of a process that no longer renews it expires."""
_SHRINK_TO = 0.95
"""Fraction of the limit to which a full cache is shrunk."""
_STEP = 1 / 64
"""Fraction of the limit that a process may add before it measures the cache size again."""
_keeping = threading.Lock()
"""Held by the thread that writes a chunk: the file lock, which is polled, only waits for other
processes."""


class Chunk(NamedTuple):
    """A piece of one version of an object."""

    name: str
    """Name of its file."""
    start: int
    """First byte in the object; ``stop`` is the byte after the last."""
    stop: int


def chunks(version: str, size: int, start: int, stop: int) -> list[Chunk]:
    """Return the chunks with a range of bytes of an object; ``version`` identifies its version."""
    return [
        Chunk(f"{version}-{first // CHUNK:06}", first, min(first + CHUNK, size))
        for first in range(start - start % CHUNK, stop, CHUNK)
    ]


class Cache:
    """Chunks of remote objects, kept in a folder. A pickled cache opens the same folder.

    A process marks a chunk that it fetches by a claim file rather than by a lock, because a claim
    expires: a process that is stopped then delays others for 30 s, and not until it ends.

    Args:
        folder: created if it does not exist; the chunks are in a subfolder.
        gigabytes: maximum size of all chunks, in units of 10^9 bytes. Each concurrent process may
            exceed it by 1/64. Each process applies its own limit, even if others use the folder.
        is_random: whether files are read at random. Nothing is then added if they exceed the limit,
            because chunks would be evicted before their next image is read.

    Raises:
        DataError: another user can write into the folder, or it cannot be created.
    """

    def __init__(self, folder: Path, gigabytes: float, *, is_random: bool = False) -> None:
        self.folder = expand_home(folder).absolute() / _FORMAT
        self._max_bytes, self._free_bytes = int(gigabytes * 1e9), 0
        self._is_random, self._file_bytes = is_random, 0
        self.keeps = True
        """Whether chunks are added; existing chunks are read in any case."""
        if reason := others_can_write(self.folder):
            raise DataError(
                f"images would be read from the cache {folder}, but {reason}; change its owner or "
                "permissions, or choose another --cache"
            )
        with os_errors_as(DataError, f"cannot create the cache {folder}"):
            create_private_folder(self.folder)

    def add_file(self, size: int) -> None:
        """Count the bytes of a file that will be read through the cache."""
        self._file_bytes += size
        if self.is_too_small:
            self.keeps = False

    @property
    def is_too_small(self) -> bool:
        """Whether nothing is added because the files exceed the limit and are read at random."""
        return self._is_random and self._file_bytes > self._max_bytes

    def has(self, chunk: Chunk) -> bool:
        """Return whether a chunk is in the cache; if so, mark it as recently used."""
        path = self.folder / chunk.name
        try:
            if path.stat().st_size == chunk.stop - chunk.start:
                with contextlib.suppress(OSError):  # a read-only cache is still read
                    os.utime(path)
                return True
            path.unlink()  # truncated by something else
        except OSError:
            pass
        return False

    def read(self, parts: Sequence[Chunk], start: int, stop: int) -> memoryview | None:
        """Return a range of an object from its chunks; None if one of them is missing."""
        into = np.empty(stop - start, np.uint8).data
        for chunk in parts:
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            try:
                with open(f"{self.folder}/{chunk.name}", "rb", buffering=0) as file:  # fast
                    part = into[first - start : last - start]
                    if os.preadv(file.fileno(), [part], first - chunk.start) < last - first:
                        return None
            except OSError:
                return None
        return into

    async def fetch(self, chunk: Chunk, get: Callable[[], Awaitable[memoryview]]) -> None:
        """Fetch a missing chunk by ``get``, or wait until another process has cached it."""
        claim = self.folder / f"{chunk.name}{_CLAIM}"
        async with storage.client().chunks:
            while self.keeps and not self.has(chunk):
                if self._take(claim):
                    renewal = asyncio.create_task(self._renew(claim))
                    try:
                        if not self.has(chunk):  # another process may just have cached it
                            await asyncio.to_thread(self._keep, chunk, await get())
                        return
                    finally:
                        renewal.cancel()
                        with contextlib.suppress(OSError):  # a claim that stays expires
                            claim.unlink()
                await asyncio.sleep(_POLL_SECONDS)

    async def _renew(self, claim: Path) -> None:
        """Keep a claim from expiring, however long the fetch takes."""
        with contextlib.suppress(OSError):
            while True:
                await asyncio.sleep(_LONGEST_WAIT / 3)
                os.utime(claim)

    def _take(self, claim: Path) -> bool:
        """Create a claim file, or return False; delete the claim of a stalled process."""
        try:
            claim.touch(0o600, exist_ok=False)
            return True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - claim.stat().st_mtime > _LONGEST_WAIT:
                    claim.unlink()
        except OSError as error:
            self._give_up(error)
        return False

    def _keep(self, chunk: Chunk, data: memoryview) -> None:
        """Write a chunk to its file, evicting other chunks if necessary."""
        part = self.folder / f"{chunk.name}.{secrets.token_hex(4)}{_PART}"
        try:
            with _keeping, FileLock(self.folder / _LOCK, timeout=_PATIENCE, poll_interval=0.002):
                if self._free_bytes < len(data):
                    self._free_bytes = self._evict_chunks(len(data))
                if self._free_bytes < len(data):
                    return
                self._free_bytes -= len(data)
                part.write_bytes(data)
                part.rename(self.folder / chunk.name)
        except Timeout:
            pass
        except OSError as error:
            self._give_up(error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        """Stop adding chunks, and log why."""
        if self.keeps:
            self.keeps = False
            log.warning(
                f"cannot write to the cache {self.folder.parent} ({why(error)}); nothing more will "
                "be cached"
            )

    def _evict_chunks(self, needed: int) -> int:
        """Evict the least recently used chunks if the cache would exceed its limit.

        Returns:
            Number of bytes that may be added before this is called again.
        """
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # a user may remove files
                if path.suffix == _PART:  # left by a killed process: this one has the lock
                    path.unlink()
                elif not path.suffix and "-" in path.name:
                    facts = path.stat()
                    files.append((facts.st_mtime_ns, facts.st_size, path))
        used = sum(size for _, size, _ in files)
        if used + needed > self._max_bytes:
            for _, size, path in sorted(files):
                if used + needed <= self._max_bytes * _SHRINK_TO:
                    break
                path.unlink(missing_ok=True)
                used -= size
        return min(self._max_bytes - used, max(needed, int(self._max_bytes * _STEP)))
