"""An object in object storage that is read by ranges, like a mapped file."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import NamedTuple

import numpy as np

from fastsiam.errors import DataError

from . import storage
from .cache import Cache, Chunk, chunks, current_cache
from .path import RemotePath
from .storage import Facts, Range

MOST_AHEAD = 2**29
"""Bytes that a process fetches ahead at most; beyond it, the oldest are dropped."""
_GAP = 2**17
"""Bytes between two ranges that are fetched with them: they take about as long as a request."""
_BLOCK = 2**23
"""Most bytes of ranges that are fetched by one request."""
_STRETCH = 4 * _BLOCK
"""Bytes that ``Onward`` fetches at once, by as many requests as they have blocks."""


class RemoteFile:
    """An object, read-only; all ranges of it that are read belong to one version.

    A pickle of it holds its address and facts.

    Raises:
        DataError: it does not exist, or is empty.
    """

    def __init__(
        self, path: RemotePath, facts: Facts | None = None, cache: Cache | None = None
    ) -> None:
        self.path = path
        found = facts or path.facts()
        if found is None:
            raise DataError(f"{path} does not exist: check the address")
        if not found.size:
            raise DataError(f"{path} is empty")
        self.facts, self._cache = found, cache or current_cache()
        version = f"{path}\n{found.etag} {found.modified}\n{found.size}".encode()
        self._version = hashlib.blake2b(version, digest_size=16).hexdigest()

    def fetch(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Fetch ranges from the server, all at once."""
        return storage.fetch(self.path, self.facts, ranges)

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes of a range; wait for them if they are being fetched.

        Args:
            start: the first byte.
            stop: the byte after the last one.

        Raises:
            DataError: they cannot be fetched.
            FileLostError: the object changed.
        """
        stop = min(stop, len(self))
        if stop <= start:
            return memoryview(b"")
        if self._cache is None:
            return self._of_server(start, stop)
        parts = chunks(self._version, len(self), start, stop)
        into = np.empty(stop - start, np.uint8).data
        if len(parts) > 1:
            self._begin(self._cache, parts)
        for chunk in parts:
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            self._read_chunk(self._cache, chunk, first, into[first - start : last - start])
        return into

    def ahead(self, ranges: Sequence[Range]) -> None:
        """Start to fetch ranges that will be read, neighbours together."""
        if self._cache is not None:
            wanted = {own: chunks(self._version, len(self), *own) for own in ranges}
            self._begin(self._cache, list(dict.fromkeys(itertools.chain(*wanted.values()))))
            if self._cache.keeps:
                return
            ranges = [own for own in ranges if not all(map(self._cache.has, wanted[own]))]
        _ahead.begin(self.path, self.facts, ranges)

    def check(self) -> None:
        """Do nothing: every request checks that the object is the same version."""

    def __len__(self) -> int:
        """Return the object's size in bytes."""
        return self.facts.size

    def __reduce__(self) -> tuple[type[RemoteFile], tuple[RemotePath, Facts, Cache | None]]:
        """Return how to make it again."""
        bare = RemotePath(self.path.scheme, self.path.host, self.path.key)
        return RemoteFile, (bare, self.facts, self._cache)

    def _of_server(self, start: int, stop: int) -> memoryview:
        """Return a range that was fetched ahead, or fetch it."""
        if (block := _ahead.take(self.path, (start, stop))) is not None:
            with contextlib.suppress(CancelledError):  # another range of it was dropped
                return block.future.result()[start - block.start : stop - block.start]
        cuts = [*range(start, stop, _BLOCK), stop]
        parts = self.fetch(list(itertools.pairwise(cuts)))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _begin(self, cache: Cache, wanted: Sequence[Chunk]) -> None:
        """Start to fetch those chunks that the cache does not have."""
        for chunk in wanted:
            if cache.keeps and not cache.has(chunk):
                with _fetching_lock:
                    if chunk.name not in _fetching:
                        get = partial(storage.get, self.path, self.facts, chunk.start, chunk.stop)
                        future = storage.submit(partial(cache.fetch, chunk, get))
                        _fetching[chunk.name] = future
                        future.add_done_callback(partial(_end, chunk.name))

    def _read_chunk(self, cache: Cache, chunk: Chunk, start: int, into: memoryview) -> None:
        """Read bytes of a chunk from the cache; fetch them if it could not keep the chunk."""
        if cache.read(chunk, start, into):
            return
        self._begin(cache, [chunk])
        if (future := _fetching.get(chunk.name)) is not None:
            future.result()
        if not cache.read(chunk, start, into):
            into[:] = self._of_server(start, start + len(into))


class _Block(NamedTuple):
    """Bytes that are fetched ahead by one request."""

    start: int
    future: Future[memoryview]


class _Ahead:
    """Ranges that are fetched ahead, until they are read."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[RemotePath, Range], _Block] = {}
        self._lock, self.bytes = threading.Lock(), 0

    def begin(self, path: RemotePath, facts: Facts, ranges: Sequence[Range]) -> None:
        """Request those ranges that are not here yet; the oldest make room."""
        with self._lock:
            missing = [own for own in ranges if (path, own) not in self._blocks]
            for start, stop, joint in joined(missing):
                request = storage.submit(partial(storage.get, path, facts, start, stop))
                self._blocks |= {(path, own): _Block(start, request) for own in joint}
                self.bytes += sum(own[1] - own[0] for own in joint)
            while self.bytes > MOST_AHEAD and len(self._blocks) > 1:
                self._drop(next(iter(self._blocks))).future.cancel()

    def take(self, path: RemotePath, own: Range) -> _Block | None:
        """Remove and return the block that holds a range."""
        with self._lock:
            return self._drop((path, own)) if (path, own) in self._blocks else None

    def _drop(self, key: tuple[RemotePath, Range]) -> _Block:
        self.bytes -= key[1][1] - key[1][0]
        return self._blocks.pop(key)


_ahead = _Ahead()
_fetching: dict[str, Future[None]] = {}
"""Chunks that this process fetches, by the names of their files."""
_fetching_lock = threading.Lock()


def _end(name: str, _: Future[None]) -> None:
    _fetching.pop(name, None)


def _after_fork() -> None:
    """Forget what the parent fetches."""
    global _ahead, _fetching_lock
    _ahead, _fetching_lock = _Ahead(), threading.Lock()
    _fetching.clear()


os.register_at_fork(after_in_child=_after_fork)


class Onward:
    """Reads a file by small ranges, one after the other, out of larger ones.

    Args:
        file: the file.
        hop: bytes to fetch where a range begins that was not fetched yet, past the cache; 0 fetches
            32 MiB, through the cache.
    """

    def __init__(self, file: RemoteFile, hop: int) -> None:
        self._file, self._hop = file, hop
        self._start, self._data = 0, memoryview(b"")

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes of a range."""
        stop = min(stop, len(self._file))
        if start < self._start or stop > self._start + len(self._data):
            end = min(max(stop, start + (self._hop or _STRETCH)), len(self._file))
            self._start = start
            if self._hop:
                (self._data,) = self._file.fetch([(start, end)])
            else:
                self._data = self._file.read(start, end)
        return self._data[start - self._start : max(start, stop) - self._start]


def joined(ranges: Sequence[Range]) -> list[tuple[int, int, list[Range]]]:
    """Join ranges that lie near to each other.

    obstore's ``get_ranges`` does that too, but checks no version.

    Returns:
        Where each block begins and ends, and the ranges that lie in it.
    """
    blocks: list[tuple[int, int, list[Range]]] = []
    for start, stop in sorted(set(ranges)):
        if stop <= start:
            continue
        if blocks:
            first, last, own = blocks[-1]
            if start - last <= _GAP and max(last, stop) - first <= _BLOCK:
                blocks[-1] = first, max(last, stop), [*own, (start, stop)]
                continue
        blocks.append((start, stop, [(start, stop)]))
    return blocks
