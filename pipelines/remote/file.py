"""Remote objects that are read by ranges, like mapped files."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from fastsiam.errors import DataError

from . import storage
from .cache import Cache, Chunk, chunks
from .path import RemotePath
from .storage import Facts, Range

MOST_AHEAD = 2**29
"""Maximum bytes that a process prefetches; beyond it, the oldest ranges are dropped."""


class RemoteFile:
    """A read-only remote object. All ranges that are read belong to the same version of it.

    A pickle contains only its path and its facts (size, time and ETag).

    Raises:
        DataError: the object does not exist, or is empty.
    """

    def __init__(self, path: RemotePath, facts: Facts | None = None) -> None:
        facts = facts or path.facts()
        if facts is None or not facts.size:
            raise DataError(f"{path} does not exist or is empty: check the address")
        self.path, self.facts, self._cache = path, facts, path.cache
        version = f"{path}\n{facts.etag} {facts.modified}\n{facts.size}"
        self._version = hashlib.blake2b(version.encode(), digest_size=16).hexdigest()

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes of a range; use the prefetched ones if there are any.

        Args:
            start: the first byte.
            stop: the byte after the last one.

        Raises:
            DataError: the range cannot be fetched.
            FileLostError: the object was changed or deleted.
        """
        stop = min(stop, len(self))
        if stop <= start:
            return memoryview(b"")
        if self._cache is not None:
            parts = chunks(self._version, len(self), start, stop)
            if (data := self._cache.read(parts, start, stop)) is None and self._cache.keeps:
                for request in self._begin(self._cache, parts):
                    storage.result(request)
                data = self._cache.read(parts, start, stop)
            if data is not None:
                return data
        if (prefetched := _ahead.take(self.path, self.facts, (start, stop))) is not None:
            return storage.result(prefetched)
        return storage.read(self.path, self.facts, start, stop)

    def prefetch(self, ranges: Sequence[Range]) -> None:
        """Start to fetch ranges that will be read soon."""
        if self._cache is not None:
            chunks_of = {span: chunks(self._version, len(self), *span) for span in ranges}
            self._begin(self._cache, dict.fromkeys(itertools.chain(*chunks_of.values())))
            if self._cache.keeps:
                return
            ranges = [span for span in ranges if not all(map(self._cache.has, chunks_of[span]))]
        _ahead.begin(self.path, self.facts, ranges)

    def check(self) -> None:
        """Do nothing: every request checks that the object has not changed."""

    def __len__(self) -> int:
        """Return the object's size in bytes."""
        return self.facts.size

    def __reduce__(self) -> tuple[type[RemoteFile], tuple[RemotePath, Facts]]:
        """Pickle the path without the server responses that it caches."""
        bare = replace(self.path, levels={}, known={})
        return RemoteFile, (bare, self.facts)

    def _begin(self, cache: Cache, parts: Iterable[Chunk]) -> list[Future[None]]:
        """Start to fetch those chunks that are not in the cache; return their requests."""
        requests = []
        for chunk in parts:
            if cache.keeps and not cache.has(chunk):
                with _fetching_lock:
                    if (request := _fetching.get(chunk.name)) is None:
                        get = partial(storage.get, self.path, self.facts, chunk.start, chunk.stop)
                        request = storage.submit(partial(cache.fetch, chunk, get))
                        _fetching[chunk.name] = request
                        request.add_done_callback(partial(_fetching.pop, chunk.name))
                requests.append(request)
        return requests


_Key = tuple[RemotePath, Facts, Range]
"""A range of one version of an object."""


class _Ahead:
    """Prefetched ranges, until they are read."""

    def __init__(self) -> None:
        self._requests: dict[_Key, Future[memoryview]] = {}
        self._lock, self.bytes = threading.Lock(), 0

    def begin(self, path: RemotePath, facts: Facts, ranges: Sequence[Range]) -> None:
        """Request the ranges that are missing or failed; drop the oldest beyond ``MOST_AHEAD``."""
        with self._lock:
            for start, stop in ranges:
                key = path, facts, (start, stop)
                old = self._requests.get(key)
                if old and old.done() and (old.cancelled() or old.exception()):
                    self._drop(key)
                if start < stop and key not in self._requests:
                    get = partial(storage.get, path, facts, start, stop)
                    self._requests[key] = storage.submit(get)
                    self.bytes += stop - start
            while self.bytes > MOST_AHEAD and len(self._requests) > 1:
                self._drop(next(iter(self._requests))).cancel()

    def take(self, path: RemotePath, facts: Facts, byte_range: Range) -> Future[memoryview] | None:
        """Remove and return the request for a range; None if there is no such request."""
        key = path, facts, byte_range
        with self._lock:
            return self._drop(key) if key in self._requests else None

    def _drop(self, key: _Key) -> Future[memoryview]:
        start, stop = key[2]
        self.bytes -= stop - start
        return self._requests.pop(key)


_ahead = _Ahead()
_fetching: dict[str, Future[None]] = {}
"""Chunks that this process is fetching, by file name."""
_fetching_lock = threading.Lock()
