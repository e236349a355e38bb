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
        with _lock:
            prefetched = _ahead.pop((self._version, start, stop), None)
        if prefetched is not None:
            return storage.result(prefetched)
        return storage.read(self.path, self.facts, start, stop)

    def prefetch(self, ranges: Sequence[Range]) -> None:
        """Start to fetch ranges that will be read soon; drop the oldest beyond ``MOST_AHEAD``."""
        if self._cache is not None:
            chunks_of = {span: chunks(self._version, len(self), *span) for span in ranges}
            self._begin(self._cache, dict.fromkeys(itertools.chain(*chunks_of.values())))
            if self._cache.keeps:
                return
            ranges = [span for span in ranges if not all(map(self._cache.has, chunks_of[span]))]
        with _lock:
            for start, stop in ranges:
                key = self._version, start, stop
                old = _ahead.get(key)
                if old and old.done() and (old.cancelled() or old.exception()):
                    del _ahead[key]
                if start < stop and key not in _ahead:
                    get = partial(storage.get, self.path, self.facts, start, stop)
                    _ahead[key] = storage.submit(get)
            excess = sum(stop - start for _, start, stop in _ahead) - MOST_AHEAD
            while excess > 0 and len(_ahead) > 1:
                _, start, stop = oldest = next(iter(_ahead))
                _ahead.pop(oldest).cancel()
                excess -= stop - start

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
                with _lock:
                    if (request := _fetching.get(chunk.name)) is None:
                        get = partial(storage.get, self.path, self.facts, chunk.start, chunk.stop)
                        request = storage.submit(partial(cache.fetch, chunk, get))
                        _fetching[chunk.name] = request
                        request.add_done_callback(partial(_fetching.pop, chunk.name))
                requests.append(request)
        return requests


_ahead: dict[tuple[str, int, int], Future[memoryview]] = {}
"""Prefetched ranges until they are read, by the object's version, start and stop; oldest first."""
_fetching: dict[str, Future[None]] = {}
"""Chunks that this process is fetching, by file name."""
_lock = threading.Lock()
"""Held to change one of these."""
