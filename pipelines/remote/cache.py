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
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastsiam.caches import others_can_write
from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.files import explained, why

from .pages import INDEX_BYTES, PAGE, Pages, is_busy, is_damage, is_full, runs

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""First byte, and the one after the last."""
Fetch = Callable[[Sequence[Range]], Sequence[bytes]]
"""Gets ranges of an object from where it is."""

_FORMAT = "fastsiam-1"
"""The folder within the user's; what is written otherwise has another name."""
_LEAST_PAGES = 4
_SAID = "said-"
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

    _open: Pages | None

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
        with self._using():  # what cannot be opened is said here, and not by each worker
            pass

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
        wanted = sorted({page for own in ranges for page in _pages_of(own)})
        found = self._kept(name, wanted)
        missing = list(runs(page for page in wanted if page not in found))
        if missing:
            asked = [(first * PAGE, min(after * PAGE, size)) for first, after in missing]
            new: dict[int, bytes] = {}
            for (first, after), data in zip(missing, fetch(asked), strict=True):
                for page in range(first, after):
                    new[page] = bytes(data[(page - first) * PAGE : (page - first + 1) * PAGE])
            self._keep(name, new)
            found |= new
        return [_cut(found, own) for own in ranges]

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs."""
        own = ("folder", "_most", "_since", "_keeps", "_reads", "_suspect")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in another process."""
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._open, self._again = None, 0.0
        _caches.add(self)

    def _kept(self, name: bytes, wanted: Sequence[int]) -> dict[int, bytes]:
        """Return those of an object's pages that are kept and whole."""
        found: dict[int, bytes] = {}
        damaged: list[int] = []
        many = min(_NOTED, self._most // 8)
        with self._using() as pages:
            if pages is None:
                return {}
            for page in wanted:
                data, is_damaged = pages.get(name, page)
                if data is not None:
                    found[page] = data
                if is_damaged:
                    damaged.append(page)
            many -= pages.unnoted
        if damaged:
            self._say("damaged", "holds damaged pages: they are fetched again")
        if damaged or many <= 0:
            with self._using(writing=True) as pages:
                if pages is not None:
                    pages.note(name, damaged)
        return found

    def _keep(self, name: bytes, new: dict[int, bytes]) -> None:
        """Keep pages of an object, if that is possible."""
        with self._using(writing=True) as pages:
            if pages is not None:
                pages.put(name, new)

    @contextlib.contextmanager
    def _using(self, *, writing: bool = False) -> Iterator[Pages | None]:
        """Give the pages, None if they cannot be used; what fails ends in a line, not an error."""
        with self._lock:
            wanted = not writing or (self._keeps and time.monotonic() >= self._again)
            pages = self._opened() if wanted else None
            try:
                yield pages
            except (OSError, sqlite3.Error) as error:
                self._give_up(error, writing)

    def _opened(self) -> Pages | None:
        if self._open is not None or not self._reads or time.monotonic() < self._again:
            return self._open
        try:
            self._open = Pages(self.folder, self._most, suspect=self._suspect)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error, writing=False)
            return None
        self._suspect = False
        if self._open.renewed:
            self._say("index", "had a damaged index: what it held is fetched again")
        return self._open

    def _give_up(self, error: OSError | sqlite3.Error, writing: bool) -> None:
        """Do without the cache, or without keeping more in it, and say why; or try again later."""
        if isinstance(error, sqlite3.Error):
            if is_busy(error):
                self._again = time.monotonic() + _PAUSE
                return
            if is_damage(error) and not self._suspect:
                self.close()
                self._suspect = True  # what is opened next is looked through
                return
        self._keeps, self._reads = False, self._reads and writing
        full = isinstance(error, sqlite3.Error) and is_full(error)
        reason = "No space left on device" if full else why(error)
        goes_on = "it keeps no more" if writing else "it is not used"
        self._say("failed", f"cannot be {'written' if writing else 'opened'} ({reason}): {goes_on}")
        if not self._reads:
            self.close()

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


def _pages_of(own: Range) -> range:
    return range(own[0] // PAGE, -(-own[1] // PAGE)) if own[1] > own[0] else range(0)


def _cut(pages: dict[int, bytes], own: Range) -> bytes:
    """Put a range together from its pages."""
    parts = [
        pages[page][max(0, own[0] - page * PAGE) : own[1] - page * PAGE] for page in _pages_of(own)
    ]
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
    _forking.held = list(_caches)
    for cache in _forking.held:
        cache._lock.acquire()
        cache.close()


def _after_fork() -> None:
    for cache in _forking.held:
        cache._lock.release()
    _forking.held = []


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
