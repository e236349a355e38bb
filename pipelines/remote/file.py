"""An object in object storage that is read by ranges, as a mapped file is."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from fastsiam.errors import DataError

from . import client
from .cache import Cache, current_cache, object_key
from .client import Block, Facts, Range
from .path import RemotePath

_GAP = 2**17
"""Bytes between two ranges that are fetched with them: what a request takes, these take about."""
_BLOCK = 2**23
"""Bytes of ranges that are fetched together, at most."""
_BLOCKS_AHEAD = 4
"""Blocks that ``Onward`` asks for ahead."""


class RemoteFile:
    """An object, read-only; every range of it that is fetched is of one and the same version.

    A pickle of it holds its address and facts.

    Raises:
        DataError: it is not there, or is empty.
    """

    def __init__(
        self, path: RemotePath, facts: Facts | None = None, cache: Cache | None = None
    ) -> None:
        self.path = path
        found = facts or path.facts()
        if found is None:
            raise DataError(f"{path} is not there: check the address")
        if not found.size:
            raise DataError(f"{path} is empty")
        self.facts = found
        self._cache = cache or current_cache()

    def fetch(self, ranges: Sequence[Range]) -> list[bytes]:
        """Fetch ranges, all at once: the one place where an object's bytes are asked for."""
        fetch = partial(client.fetch, self.path, self.facts)
        if self._cache is None:
            return fetch(ranges)
        size, modified, etag = self.facts
        key = object_key(str(self.path), tag=f"{etag} {modified}", size=size)
        return self._cache.get_many(key, size, ranges, fetch)

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes between two places: waits for those that were asked for ahead.

        Raises:
            DataError: they cannot be fetched.
            FileLostError: the object changed.
        """
        stop = min(stop, len(self))
        if stop <= start:
            return memoryview(b"")
        if (block := client.taken(self.path, (start, stop))) is not None:
            with contextlib.suppress(CancelledError):  # another range of it was let go of
                data = memoryview(block.future.result())
                return data[start - block.start : stop - block.start]
        cuts = [*range(start, stop, _BLOCK), stop]
        parts = self.fetch(list(itertools.pairwise(cuts)))
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def ahead(self, ranges: Sequence[Range]) -> None:
        """Begin to fetch ranges that will be read, those near to each other together."""
        begun = []
        ranges = client.not_ahead(self.path, ranges)
        for start, stop, own in joined(ranges):
            future = client.in_background(self._fetched, start, stop)
            begun.append((Block(start, future), own))
        client.keep_ahead(self.path, begun)

    def check(self) -> None:
        """Do nothing: that the object changed is seen by every range."""

    def __len__(self) -> int:
        """Return the object's size in bytes."""
        return self.facts.size

    def __reduce__(self) -> tuple[type[RemoteFile], tuple[RemotePath, Facts, Cache | None]]:
        """Return how to make it again."""
        bare = RemotePath(self.path.scheme, self.path.host, self.path.key)
        return RemoteFile, (bare, self.facts, self._cache)

    def _fetched(self, start: int, stop: int) -> bytes:
        return self.fetch([(start, stop)])[0]


class AsFile(io.RawIOBase):
    """A file on another machine as Python's files are, for libraries that read these."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that any place can be read."""
        return True

    def readinto(self, into: Any) -> int:
        """Read as many bytes as there is room for, up to the end."""
        data = self._file.read(self._at, self._at + len(into))
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._file)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at


class Onward:
    """Reads a file by small ranges, one after the other, out of larger ones that are fetched.

    Args:
        file: the file.
        hop: bytes to fetch from where a range begins that was not fetched; 0 is to fetch all from
            there on, before it is asked for.
    """

    def __init__(self, file: RemoteFile, hop: int) -> None:
        self._file, self._hop = file, hop
        self._start, self._data, self._asked = 0, memoryview(b""), 0

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes between two places."""
        stop = min(stop, len(self._file))
        if start < self._start or stop > self._start + len(self._data):
            self._start, self._data = self._fetched(start, stop)
        return self._data[start - self._start : max(start, stop) - self._start]

    def _fetched(self, start: int, stop: int) -> tuple[int, memoryview]:
        if self._hop:
            return start, self._file.read(start, max(stop, start + self._hop))
        first = start - start % _BLOCK
        begins = range(first, max(stop, start + 1), _BLOCK)
        whole = range(max(first, self._asked), begins[-1] + (_BLOCKS_AHEAD + 1) * _BLOCK, _BLOCK)
        size = len(self._file)
        self._file.ahead([(at, min(at + _BLOCK, size)) for at in whole if at < size])
        self._asked = max(self._asked, whole.stop)
        parts = [self._file.read(at, min(at + _BLOCK, size)) for at in begins]
        return first, parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def joined(ranges: Sequence[Range]) -> list[tuple[int, int, list[Range]]]:
    """Join ranges that lie near to each other.

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
