"""Remote addresses with the methods of ``pathlib.Path``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from fastsiam.config.urls import Url
from fastsiam.errors import DataError

from . import storage
from .cache import Cache
from .storage import Facts, Level

_BRACES = re.compile(r"\{([^{}]*)\}")
_PROBED = ("train.beton", "val.beton")
"""File names to try on web servers, which cannot list their files."""


class Stat(NamedTuple):
    """Size and modification time of an object, like the result of ``os.stat``."""

    st_size: int
    st_mtime_ns: int
    """The sub-second part is a hash of the ETag, because servers report whole seconds."""


@dataclass(frozen=True, order=True)
class RemotePath(Url):
    """A remote address with the methods of ``pathlib.Path``.

    It caches the responses of servers and shares them with all paths derived from it. If an object
    changes in the meantime, reading it raises an error.
    """

    levels: dict[str, Level] = field(default_factory=dict, compare=False, repr=False)
    known: dict[str, Facts | None] = field(default_factory=dict, compare=False, repr=False)
    cache: Cache | None = field(default=None, compare=False, repr=False)
    """Disk cache for the files that are opened."""

    @property
    def is_on_web(self) -> bool:
        """Whether the address is on a web server, which cannot list its files."""
        return self.scheme in ("http", "https")

    def facts(self, *, denied_is_absent: bool = False) -> Facts | None:
        """Return the size, time and ETag of the object; None if it does not exist.

        Args:
            denied_is_absent: whether to return None if access is denied, which is how many servers
                respond for an object that does not exist.
        """
        is_folder = not self.suffix or self.key in self.levels
        if not self.key or (self.is_on_web and is_folder):  # web servers send a page for a folder
            return None
        # On a web server, the listing of a folder is a guess.
        if self.key not in self.known and (level := self.levels.get(self.parent.key)) is not None:
            return level.files.get(self.name)
        if self.key not in self.known:
            (facts,) = storage.heads([self], denied_is_absent=denied_is_absent)
            self.known[self.key] = facts
        return self.known[self.key]

    def stat(self) -> Stat:
        """Return the size and modification time of the object.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        if (facts := self.facts()) is None:
            raise FileNotFoundError(2, "No such object", str(self))
        subseconds = int.from_bytes(facts.etag.encode(), "little") % 999_999_937
        return Stat(facts.size, facts.modified * 10**9 + subseconds)

    def is_file(self) -> bool:
        """Return whether this is an object that can be read."""
        return self.facts(denied_is_absent=True) is not None

    def is_dir(self) -> bool:
        """Return whether there are objects below this path."""
        if self.key and (level := self.levels.get(self.parent.key)) is not None:
            return self.name in level.folders
        return any(self._level())

    def exists(self) -> bool:
        """Return whether this is an object, or there are objects below it.

        Raises:
            DataError: access is denied.
        """
        return self.facts() is not None or self.is_dir()

    def iterdir(self) -> Generator[Self, None, None]:
        """Yield the files and folders directly below this path, sorted by name."""
        level = self._level()
        for name in sorted({*level.files, *level.folders}):
            yield self / name

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the files and folders directly below this path that match a glob pattern."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Iterator[Self]:
        """Yield all files below this path, recursively, whose names match a glob pattern."""
        for path in self.iterdir():
            if path.name in self._level().files:
                if fnmatch.fnmatchcase(path.name, pattern):
                    yield path
            else:
                yield from path.rglob(pattern)

    def read_bytes(self) -> bytes:
        """Return the contents of a small object."""
        if (facts := self.facts()) is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return bytes(storage.read(self, facts, 0, facts.size))

    def hint(self) -> str:
        """Return advice to append to an error message that this path does not exist."""
        if not self.is_on_web:
            return ""
        return (
            "; web servers do not list their files: name each file except train.beton and "
            "val.beton, or several as in train-{0000..0012}.tar"
        )

    def _level(self) -> Level:
        """List the objects directly below this path; on a web server, try a few names instead."""
        if (level := self.levels.get(self.key)) is not None:
            return level
        if self.is_on_web:
            level = Level(self.files(_PROBED, denied_are_absent=True), frozenset())
        else:
            level = storage.level(self)
        self.levels[self.key] = level
        return level

    def files(self, names: Sequence[str], *, denied_are_absent: bool = False) -> dict[str, Facts]:
        """Return the facts of those named objects directly below this path that exist."""
        urls = [self / name for name in names]
        answers = storage.heads(urls, denied_is_absent=denied_are_absent)
        return {name: facts for name, facts in zip(names, answers, strict=True) if facts}


Place = Path | RemotePath
"""Location of data: a local path or a remote address."""


def open_place(where: Path | Url, cache: Cache | None = None) -> Place:
    """Return a location as a path.

    ``{0000..0012}`` and ``{a,b}`` in the last part of an address stand for several files. The path
    is then their folder, which appears to contain only those files.

    Raises:
        DataError: one of the files does not exist.
    """
    if isinstance(where, (Path, RemotePath)):
        return where
    path = RemotePath(where.scheme, where.host, where.key, cache=cache)
    if not _BRACES.search(path.key):
        return path
    folder, names = path.parent, _expand(path.name)
    if _BRACES.search(folder.key):
        raise DataError(f"{where} has braces before its last part; use them only in the last")
    files = folder.files(names)
    if missing := [name for name in names if name not in files]:
        raise DataError(f"{folder / missing[0]} does not exist: check the address")
    folder.levels[folder.key] = Level(files, frozenset())
    return folder


def _expand(name: str) -> list[str]:
    """Expand the braces in a name into all names that it stands for, like a shell."""
    if (match := _BRACES.search(name)) is None:
        return [name]
    if bounds := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        first, last = int(bounds[1]), int(bounds[2])
        step = 1 if first <= last else -1
        choices = [f"{number:0{len(bounds[1])}}" for number in range(first, last + step, step)]
    else:
        choices = match[1].split(",")
    before, after = name[: match.start()], name[match.end() :]
    return [expansion for choice in choices for expansion in _expand(f"{before}{choice}{after}")]
