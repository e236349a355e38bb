"""A cache on disk for ranges of remote objects: of bounded size, shared by all of a machine.

    cache = Cache(Path("/scratch/cache"), gigabytes=200)
    first, second = cache.get_many(key, size, [(0, 100), (5000, 9000)], fetch)

Ranks, loader workers and other runs may use one folder at the same time; any of them may be killed
at any point. What goes wrong with the cache is said once, and never ends a run: what is not to be
had from it is fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fastsiam.caches import others_can_write
from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.files import explained, why

from .pages import INDEX_BYTES, PAGE, Page, Pages, is_busy, is_damage, is_full, runs

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""First byte, and the one after the last."""
Fetch = Callable[[Sequence[Range]], Sequence[bytes]]
"""Gets ranges of an object from where it is."""

_FORMAT = "fastsiam-1"
"""The folder within the user's; what is written otherwise has another name."""
_LEAST_PAGES = 4
_SAID = "said-"
_MOST_WAITING = 256
"""Pages that wait to be written, in each process; more are not kept."""
_PAUSE = 60.0
"""Seconds without writing after another process kept this one waiting, as one that is stopped."""
_NOTED = 4096
"""Pages that are read before the index learns that they were."""


def object_key(url: str, *, tag: str, size: int) -> str:
    """Return the name of one state of an object, for ``Cache``.

    Args:
        url: where it is; a password or a signature in it goes for nothing.
        tag: what changes with its content: its ETag, or when it was last changed.
        size: its bytes.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}\n{tag}\n{size}"


class Cache:
    """Ranges of objects, kept on disk in pages of ``pages.PAGE`` bytes.

    May be used by several threads, after a fork, and in a process that it is sent to.

    Args:
        folder: made if it is not there; what is kept lies in a folder within.
        gigabytes: 10^9 bytes that are kept at most. The folder never holds more than that and
            ``pages.SLACK``. Where others keep to another limit in the same folder, it grows up to
            the larger one, and comes down to the smaller one whenever a process that was given it
            writes.

    Raises:
        DataError: another user can write into the folder; or it cannot be made.
    """

    def __init__(self, folder: Path, gigabytes: float) -> None:
        self.folder = folder.expanduser().absolute() / _FORMAT
        if reason := others_can_write(self.folder):
            raise DataError(
                f"images would be read from the cache {folder}, but {reason}: take it into your "
                "own hands, or choose another --cache"
            )
        with explained(DataError, f"cannot make the cache {folder}"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._most = max(_LEAST_PAGES, int(gigabytes * 1e9) // (PAGE + INDEX_BYTES))
        self._since = time.time_ns()
        self._keeps = self._reads = True
        self._suspect = False
        self._make_marks()
        self._begin()
        with self._reading.lock:
            self._opened(self._reading)  # what is wrong is said here, and not by each worker

    def get_many(self, key: str, size: int, ranges: Sequence[Range], fetch: Fetch) -> list[bytes]:
        """Return ranges of an object.

        Args:
            key: names the object in the state that it is in; see ``object_key``.
            size: of the object, in bytes.
            ranges: of bytes, any order, within the object.
            fetch: gets what is not kept: whole pages, neighbours as one range, ascending. What it
                raises is raised.
        """
        name = hashlib.blake2b(key.encode(), digest_size=16).digest()
        wanted = [_pieces(own) for own in ranges]
        found = self._kept(name, sorted({piece for pieces in wanted for piece in pieces}))
        lacking = {piece.page for pieces in wanted for piece in pieces if piece not in found}
        if lacking:
            new = _fetched(sorted(lacking), size, fetch)
            self._keep(name, new)
            for piece in (p for pieces in wanted for p in pieces if p not in found):
                found[piece] = new[piece.page][piece.start : piece.stop]
        parts = [[found[piece] for piece in pieces] for pieces in wanted]
        return [own[0] if len(own) == 1 else b"".join(own) for own in parts]

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        for way in (self._writing, self._reading):
            with way.lock:
                way.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        own = ("folder", "_most", "_since", "_keeps", "_reads", "_suspect")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in another process."""
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._reading, self._writing = _Way(), _Way()
        self._waiting: deque[Page] = deque()
        self._again = 0.0
        _caches.add(self)

    def _kept(self, name: bytes, wanted: Sequence[_Piece]) -> dict[_Piece, bytes]:
        """Return those of an object's pieces that are kept and whole."""
        found: dict[_Piece, bytes] = {}
        damaged: list[int] = []
        many = min(_NOTED, self._most // 8)
        with self._using(self._reading) as pages:
            if pages is None:
                return {}
            for piece in wanted:
                data, is_damaged = pages.get(name, *piece)
                if data is not None:
                    found[piece] = data
                if is_damaged:
                    damaged.append(piece.page)
            many -= len(pages.read)
        if damaged:
            self._say("damaged", "holds damaged pages: they are fetched again")
        if damaged or many <= 0:
            with self._using(self._writing) as pages:
                if pages is not None:
                    pages.note(self._read(), name, damaged)
        return found

    def _keep(self, name: bytes, new: dict[int, bytes]) -> None:
        """Keep pages of an object, if that is possible.

        One thread writes at a time, what others leave to it too: many requests are under way at
        once, and none waits for a disk.
        """
        room = _MOST_WAITING - len(self._waiting)
        self._waiting.extend(Page(name, *page) for page in itertools.islice(new.items(), room))
        while self._waiting and self._writing.lock.acquire(blocking=False):
            try:
                with self._using(self._writing) as pages:
                    waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
                    if pages is not None:
                        if read := self._read():
                            pages.note(read)
                        pages.put(waiting)
            finally:
                self._writing.lock.release()

    def _read(self) -> set[int]:
        """Take the slots that were read since this was last asked."""
        with self._reading.lock:
            pages = self._reading.pages
            if pages is None:
                return set()
            read, pages.read = pages.read, set()
            return read

    @contextlib.contextmanager
    def _using(self, way: _Way) -> Iterator[Pages | None]:
        """Give the pages, None if they cannot be used; what fails ends in a line, not an error."""
        writes = way is self._writing
        with way.lock:
            wanted = not writes or (self._keeps and time.monotonic() >= self._again)
            pages = self._opened(way) if wanted else None
            try:
                yield pages
            except (OSError, sqlite3.Error) as error:
                self._give_up(error, way)

    def _opened(self, way: _Way) -> Pages | None:
        if way.pages is not None or not self._reads or time.monotonic() < self._again:
            return way.pages
        try:
            way.pages = Pages(self.folder, self._most, suspect=self._suspect)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error, way, opening=True)
            return None
        self._suspect = False
        if way.pages.renewed:
            self._say("index", "had a damaged index: what it held is fetched again")
        return way.pages

    def _give_up(self, error: OSError | sqlite3.Error, way: _Way, *, opening: bool = False) -> None:
        """Do without the cache, or without keeping more in it, and say why; or try again later."""
        if isinstance(error, sqlite3.Error):
            if is_busy(error):
                self._again = time.monotonic() + _PAUSE
                return
            if is_damage(error) and not self._suspect:
                way.close()
                self._suspect = True  # what is opened next is looked through
                return
        reads = way is self._writing and not opening
        self._keeps, self._reads = False, self._reads and reads
        full = isinstance(error, sqlite3.Error) and is_full(error)
        reason = "No space left on device" if full else why(error)
        goes_on = "it keeps no more" if reads else "it is not used"
        self._say("failed", f"cannot be {'written' if reads else 'opened'} ({reason}): {goes_on}")
        if not reads:
            way.close()

    def _say(self, what: str, message: str) -> None:
        """Say something, if no process has said it since this run began."""
        with contextlib.suppress(OSError):  # then it may be said again
            file = os.open(self.folder / f"{_SAID}{what}", os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_mtime_ns >= self._since:
                    return
                os.utime(file, ns=(time.time_ns(), time.time_ns()))
            finally:
                os.close(file)
        log.warning(f"the cache {self.folder.parent} {message}")

    def _make_marks(self) -> None:
        """Make the files whose times say when something was said."""
        for what in ("damaged", "index", "failed"):
            with contextlib.suppress(OSError):
                mark = os.open(self.folder / f"{_SAID}{what}", os.O_CREAT | os.O_EXCL, 0o600)
                os.utime(mark, (0, 0))
                os.close(mark)


class _Way:
    """The pages as they are opened for one purpose, by one thread at a time."""

    def __init__(self) -> None:
        self.lock, self.pages = threading.RLock(), None

    pages: Pages | None

    def close(self) -> None:
        """Close them."""
        if self.pages is not None:
            self.pages.close()
            self.pages = None


class _Piece(NamedTuple):
    """Bytes of one page of an object."""

    page: int
    start: int
    """Where in the page they begin."""
    stop: int


def _pieces(own: Range) -> list[_Piece]:
    """Cut a range at the edges of pages."""
    pages = range(own[0] // PAGE, -(-own[1] // PAGE)) if own[1] > own[0] else ()
    return [
        _Piece(page, max(0, own[0] - page * PAGE), min(PAGE, own[1] - page * PAGE))
        for page in pages
    ]


def _fetched(pages: Sequence[int], size: int, fetch: Fetch) -> dict[int, bytes]:
    """Fetch whole pages of an object of a size, neighbours as one range."""
    found: dict[int, bytes] = {}
    together = list(runs(pages))
    asked = [(first * PAGE, min(after * PAGE, size)) for first, after in together]
    for (first, after), data in zip(together, fetch(asked), strict=True):
        view = memoryview(data)
        for page in range(first, after):
            found[page] = bytes(view[(page - first) * PAGE : (page - first + 1) * PAGE])
    return found


@contextlib.contextmanager
def cached(data: DataConfig) -> Iterator[Cache | None]:
    """Have remote files that are opened inside keep what they read by a run's settings.

    Raises:
        DataError: the cache cannot be had; see ``Cache``.
    """
    global _current
    before, known = _current, (data.cache, data.cache_gb)
    if data.cache and known not in _made:
        _made[known] = Cache(Path(data.cache), data.cache_gb)
    _current = _made.get(known)
    try:
        yield _current
    finally:
        _current = before


def current_cache() -> Cache | None:
    """Return the cache of the files that are opened just now, if there is one."""
    return _current


_current: Cache | None = None
_made: dict[tuple[str, float], Cache] = {}
_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """Close what SQLite must not take into another process; both open it again."""
    _forking.held = [way for cache in _caches for way in (cache._writing, cache._reading)]
    for way in _forking.held:
        way.lock.acquire()
        way.close()


def _after_fork() -> None:
    for way in _forking.held:
        way.lock.release()
    _forking.held = []


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
