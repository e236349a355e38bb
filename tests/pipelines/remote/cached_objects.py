"""Objects of a fake server that are read through the cache, in small chunks."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from fastsiam.config.urls import Url
from fastsiam.errors import FileLostError
from fastsiam.pipelines.remote import RemoteFile, RemotePath, cache, file, storage
from fastsiam.pipelines.remote.cache import Cache
from fastsiam.pipelines.remote.storage import Facts

CHUNK = 1 << 14
"""Bytes of a chunk in these tests."""
SIZE = 20 * CHUNK + 1000
"""Bytes of each test object, whose last chunk is short."""


@lru_cache
def content(key: str) -> bytes:
    """Return an object's bytes, which depend on its key."""
    seed = np.frombuffer(key.encode().ljust(8, b"_")[:8], np.uint8)
    return np.random.default_rng(seed.tolist()).integers(0, 256, SIZE, np.uint8).tobytes()


class Server:
    """A fake server that records the requested ranges."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.is_down = False

    async def get(self, url: Url, facts: Facts, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        if self.is_down:
            raise FileLostError(f"{url} was deleted")
        return memoryview(content(url.key))[start:stop]


def serve() -> Server:
    """Make this process read from a fake server, in small chunks."""
    server = Server()
    storage.get, cache.CHUNK = server.get, CHUNK
    return server


def cache_of(folder: Path, most: int) -> Cache:
    return Cache(folder, gigabytes=most * CHUNK / 1e9)


def remote(disk_cache: Cache, key: str = "a", etag: str = "x") -> RemoteFile:
    return RemoteFile(RemotePath("s3", "bucket", key, cache=disk_cache), Facts(SIZE, 0, etag))


def files(folder: Path) -> list[Path]:
    """Return the chunk files, and the incomplete ones that a killed process left."""
    return sorted(path for path in (folder / "chunks-1").iterdir() if path.name != "lock")


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder) if not path.suffix)


def wait_for_fetches() -> None:
    """Wait until this process fetches no chunk."""
    while file._fetching:
        time.sleep(0.001)
