"""A file of pages and its index: the least recently used make room, whoever writes.

The pages lie in the slots of one file. Which page lies where is in an SQLite database beside it,
whose transactions are what keeps several processes apart, and what a process that is killed in the
midst of one leaves undone. A slot is written only while the index, as it was committed, has nothing
in it; and each page has checksums, into which its name goes: so a reader never takes one page for
another, whatever was written since it looked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import struct
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PAGE = 1 << 18
"""Bytes of a page, 256 KiB. An image of 100 KB lies in 1.4 of them; a shard is fetched in runs."""
PART = 1 << 15
"""Bytes of a page that have a checksum of their own: of a page, only what is wanted is read."""
INDEX_BYTES = 256
"""What is reckoned for a page's rows of the index."""
SLACK = 16 << 20
"""Bytes by which the folder may exceed its bound: the index's log, and the pages of its tables."""

_PATIENCE = 5.0
"""Seconds to wait for another process that writes."""
_LOOK = 5e-4
"""Seconds between two looks whether it has ended."""
_TABLES = """
CREATE TABLE IF NOT EXISTS slots (
    slot INTEGER PRIMARY KEY, object BLOB, page INTEGER, bytes INTEGER, sums BLOB,
    used INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS by_page ON slots (object, page);
CREATE INDEX IF NOT EXISTS by_use ON slots (used);
CREATE TABLE IF NOT EXISTS state (pages TEXT);
"""
_FREE = 0
"""``used`` of a slot in which nothing is; of others it is when they were read, in ns."""


class Page(NamedTuple):
    """A page of an object."""

    name: bytes
    """Of the object, 16 bytes."""
    number: int
    data: bytes


class _Slot(NamedTuple):
    number: int
    size: int
    sums: bytes


class Pages:
    """The pages of a folder, as one process sees them; no two threads at a time.

    Args:
        folder: is there, and this user's own.
        most: pages that are kept. Another process may keep to another number: each writes only
            after it has brought the file to its own.

        suspect: look through the whole index: there was an error that says that it is damaged.

    Raises:
        OSError: the files cannot be opened, or the disk is full.
        sqlite3.Error: so it is for the index.
    """

    def __init__(self, folder: Path, most: int, *, suspect: bool = False) -> None:
        self.renewed = False
        """Whether the index was damaged, so that all pages are gone."""
        self._folder, self._most = folder, most
        self.read: set[int] = set()
        """Slots that were read from; whoever notes them takes them out."""
        with _locked(folder):
            try:
                self._connect(suspect)
            except (sqlite3.DatabaseError, _Damaged) as error:
                if isinstance(error, sqlite3.Error) and not is_damage(error):
                    raise
                self._remove()
                self._connect(suspect=False)
                self.renewed = True
        self._end = weakref.finalize(self, _close, self._index, self._file)
        with contextlib.suppress(_Busy):
            self._make_room(0)

    def close(self) -> None:
        """Close the files."""
        self._end()

    def get(self, name: bytes, page: int, start: int, stop: int) -> tuple[bytes | None, bool]:
        """Return bytes of a page, None if it is not there; and whether it is there, but damaged.

        Args:
            name: of the object, 16 bytes.
            page: number of its page.
            start: where in the page they begin.
            stop: where they end.

        Raises:
            sqlite3.Error: the index cannot be read.
            OSError: the file cannot be read.
        """
        slot = self._find(name, page)
        while slot is not None:
            first, after = start // PART, -(-stop // PART)
            begin, end = first * PART, min(after * PART, slot.size)
            data = os.pread(self._file, max(0, end - begin), slot.number * PAGE + begin)
            if (
                len(data) >= stop - begin
                and _sums(name, page, data, first) == slot.sums[4 * first : 4 * after]
            ):
                self.read.add(slot.number)
                return data[start - begin : stop - begin], False
            before, slot = slot, self._find(name, page)
            if slot == before:  # nobody took the slot meanwhile
                return None, True
        return None, False

    def put(self, pages: Sequence[Page]) -> None:
        """Keep pages; what was read longest ago makes room for them.

        Args:
            pages: as many as fit are kept, and none that is kept already.

        Raises:
            OSError: the disk is full, or fails.
            sqlite3.Error: so it is for the index.
        """
        self._make_room(len(pages))
        self._write(pages)

    def note(self, read: Iterable[int], name: bytes = b"", damaged: Iterable[int] = ()) -> None:
        """Have the index know which slots were read, and free those of an object's damaged pages.

        Raises:
            OSError: the disk is full, or fails.
            sqlite3.Error: so it is for the index.
        """
        with self._transaction():
            now = time.time_ns()
            self._index.executemany(
                "UPDATE slots SET used = ? WHERE slot = ? AND used != ?",
                ((now, slot, _FREE) for slot in read),
            )
            self._index.executemany(
                f"{_FREED} WHERE object = ? AND page = ?",  # of constants  # nosec B608
                ((name, page) for page in damaged),
            )

    def _connect(self, suspect: bool) -> None:
        self._index = sqlite3.connect(
            self._folder / "index",
            timeout=_PATIENCE,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._index.execute("PRAGMA journal_mode = WAL")
            self._index.execute("PRAGMA synchronous = OFF")  # a kill loses nothing by it
            self._index.execute(f"PRAGMA journal_size_limit = {SLACK // 4}")
            if suspect and self._index.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                raise _Damaged
            self._index.executescript(_TABLES)
            self._file = os.open(self._folder / self._pages(), os.O_RDWR | os.O_CREAT, 0o600)
        except BaseException:
            self._index.close()
            raise

    def _pages(self) -> str:
        """Return the name of the file of pages; another index had another one."""
        row = self._index.execute("SELECT pages FROM state").fetchone()
        if row is None:
            row = (f"pages-{secrets.token_hex(4)}",)
            self._index.execute("INSERT INTO state VALUES (?)", row)
        name = str(row[0])
        for path in self._folder.glob("pages-*"):
            if path.name != name:
                path.unlink(missing_ok=True)
        return name

    def _remove(self) -> None:
        for name in ("index", "index-wal", "index-shm"):
            (self._folder / name).unlink(missing_ok=True)

    def _find(self, name: bytes, page: int) -> _Slot | None:
        row = self._index.execute(
            "SELECT slot, bytes, sums FROM slots WHERE object = ? AND page = ?", (name, page)
        ).fetchone()
        return None if row is None else _Slot(*row)

    def _make_room(self, wanted: int) -> None:
        """Have so many slots free, or as many as there are, and no more than are to be."""
        with self._transaction():
            count = self._count()
            if too_many := count > self._most:
                self._index.execute("DELETE FROM slots WHERE slot >= ?", (self._most,))
            new = range(count, min(count + wanted, self._most))
            self._index.executemany(
                "INSERT INTO slots (slot, used) VALUES (?, ?)", ((slot, _FREE) for slot in new)
            )
            oldest = "SELECT slot FROM slots ORDER BY used LIMIT ?"
            self._index.execute(
                f"{_FREED} WHERE slot IN ({oldest})",  # of constants  # nosec B608
                (wanted,),
            )
        if too_many:
            with self._transaction():  # of its own: until now others read these slots
                if self._count() <= self._most:
                    os.truncate(self._file, self._most * PAGE)
            with contextlib.suppress(sqlite3.OperationalError):  # others are at work: later, then
                self._index.execute("VACUUM")

    def _count(self) -> int:
        (last,) = self._index.execute("SELECT max(slot) FROM slots").fetchone()
        return 0 if last is None else int(last) + 1

    def _write(self, pages: Sequence[Page]) -> None:
        with self._transaction():
            free = self._index.execute(
                "SELECT slot FROM slots WHERE used = ? LIMIT ?", (_FREE, len(pages))
            ).fetchall()
            now = time.time_ns()
            for (slot,), (name, page, data) in zip(free, pages, strict=False):
                _write_at(self._file, data, slot * PAGE)
                sums = _sums(name, page, data)
                self._index.execute(_TAKEN, (name, page, len(data), sums, now, slot))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _locked(self._folder):
            self._index.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._index.execute("COMMIT")
            except BaseException:
                if self._index.in_transaction:
                    self._index.execute("ROLLBACK")
                raise


_TAKEN = """
UPDATE OR IGNORE slots SET object = ?, page = ?, bytes = ?, sums = ?, used = ? WHERE slot = ?
"""
"""Ignored where another process put the page meanwhile."""
_FREED = f"UPDATE slots SET object = NULL, page = NULL, used = {_FREE}"  # nosec B608


class _Busy(sqlite3.OperationalError):
    """Another process has been writing for seconds."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY


class _Damaged(Exception):
    """The index is no index."""


def _close(index: sqlite3.Connection, file: int) -> None:
    index.close()
    os.close(file)


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's number of an error, without what it adds to it."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_damage(error: sqlite3.Error) -> bool:
    """Tell whether an error says that the index is no index."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_busy(error: sqlite3.Error) -> bool:
    """Tell whether an error says that another process had the index for seconds."""
    return _code(error) == sqlite3.SQLITE_BUSY


def is_full(error: sqlite3.Error) -> bool:
    """Tell whether an error says that the disk is full."""
    return _code(error) == sqlite3.SQLITE_FULL


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from opening or writing a folder's files.

    SQLite's own way to wait for a lock sleeps for up to 0.1 s between two looks.

    Raises:
        _Busy: another process had the lock for ``_PATIENCE``.
    """
    deadline = time.monotonic() + _PATIENCE
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise _Busy
            time.sleep(_LOOK)
        yield
    finally:
        os.close(file)


def _sums(name: bytes, page: int, data: bytes, first: int = 0) -> bytes:
    """Return the checksums of parts of a page, the first of which has a number: 4 bytes each."""
    own, view = zlib.crc32(name + page.to_bytes(8, "little")), memoryview(data)
    parts = enumerate(range(0, len(data), PART), first)
    sums = [zlib.crc32(view[at : at + PART], own ^ number) for number, at in parts]
    return struct.pack(f"<{len(sums)}I", *sums)


def _write_at(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, offset)
        rest, offset = rest[done:], offset + done


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of ascending page numbers: first, and the one after the last."""
    first = after = -1
    for page in pages:
        if page != after:
            if after > 0:
                yield first, after
            first = page
        after = page + 1
    if after > 0:
        yield first, after
