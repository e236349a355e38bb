"""Files of a data set by name, in folders, tars and zips: all are read where they are."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError
from fastsiam.files import explained
from fastsiam.pipelines.store.tar import members, safe_name

LARGEST_FILE = 2**28
"""Bytes of the largest file that is read, COCO's annotations apart."""


class Files(ABC):
    """Files by names such as ``VOC2007/JPEGImages/000005.jpg``."""

    root: Path
    """Where they lie, for messages."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""

    @abstractmethod
    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes; threads may read at once.

        Raises:
            DataError: it is not there, cannot be read, or has more than ``limit`` bytes.
        """

    def stamp(self, names: Iterable[str]) -> str:
        """Return a text that changes when the archive does (name, size, modification time)."""
        with explained(DataError, f"cannot read {self.root}"):
            found = self.root.stat()
        return json.dumps([self.root.name, found.st_size, found.st_mtime_ns])

    def where(self, name: str) -> str:
        """Return where a file lies, for messages."""
        return f"{self.root}: {name}"

    def _check_size(self, name: str, size: int, limit: int) -> None:
        if size > limit:
            raise DataError(f"{self.where(name)} has {size:,} bytes, too large for what it is")


class Tree(Files):
    """Files in folders. A folder is listed once, when the first of its files is looked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._listed: dict[str, frozenset[str]] = {}

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        folder, _, own = name.rpartition("/")
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(os.listdir(self.root / folder))
            except FileNotFoundError:
                self._listed[folder] = frozenset()
            except OSError as error:
                raise DataError(f"cannot list {self.root / folder}: {error.strerror}") from error
        return own in self._listed[folder]

    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes."""
        path = self.root / name
        with explained(DataError, f"cannot read {path}"), path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"{path} is no file, but a device or a pipe")
            self._check_size(name, found.st_size, limit)
            return file.read(found.st_size)

    def stamp(self, names: Iterable[str]) -> str:
        """Return a text that changes when these files do (names, sizes, modification times)."""
        digest = hashlib.sha256()
        for name in names:
            path = self.root / name
            with explained(DataError, f"cannot read {path}"):
                found = path.stat()
            digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        return digest.hexdigest()

    def where(self, name: str) -> str:
        """Return a file's path, for messages."""
        return str(self.root / name)


class Tar(Files):
    """Files of a tar.

    Args:
        path: the tar.
        tops: folders that the names begin with; what leads to the first of them is left out.

    Raises:
        DataError: it is damaged, cut, or holds what cannot be read in place.
    """

    def __init__(self, path: Path, tops: tuple[str, ...]) -> None:
        self.root, self._tops = path, tops
        with explained(DataError, f"cannot read {path}"):
            self._file = path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
        self._places: dict[str, tuple[int, int]] = {}
        above: str | None = None
        for member, start in members(self._between, 0, size, path):
            name = safe_name(member.name)
            parts = name.split("/")
            if above is None and (top := next((part for part in parts if part in tops), None)):
                above = "".join(f"{part}/" for part in parts[: parts.index(top)])
            self._places[name] = start, member.size
        self._places = {
            name.removeprefix(above or ""): place for name, place in self._places.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return Tar, (self.root, self._tops)

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        return name in self._places

    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes."""
        if name not in self._places:
            raise DataError(f"{self.root} holds no {name}")
        start, size = self._places[name]
        self._check_size(name, size, limit)
        found = self._between(start, start + size)
        if len(found) < size:
            raise DataError(f"{self.where(name)} was cut off after the tar was opened")
        return found

    def _between(self, start: int, end: int) -> bytes:
        with explained(DataError, f"cannot read {self.root}"):
            return os.pread(self._file.fileno(), end - start, start)


class Zip(Files):
    """Files of a zip, stored or deflated, with the checksums that the zip holds of them.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.root, self._process = path, os.getpid()
        try:
            with explained(DataError, f"cannot read {path}"):
                self._zip = zipfile.ZipFile(path)
            found = self._zip.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise DataError(
                f"{path} is no whole zip file ({error}); fetch it again, or check it with unzip -t"
            ) from error
        self._members = {safe_name(member.filename): member for member in found}

    def __reduce__(self) -> tuple[Any, ...]:
        return Zip, (self.root,)

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        return name in self._members and not self._members[name].is_dir()

    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes."""
        if name not in self:
            raise DataError(f"{self.root} holds no {name}")
        member = self._members[name]
        self._check_size(name, max(member.file_size, member.compress_size), limit)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # The others may take gigabytes of memory to read what is damaged.
            raise DataError(f"{self.where(name)} is compressed in another way than by deflate")
        try:
            with explained(DataError, f"cannot read {self.root}"):
                if self._process != os.getpid():  # forked, which shares the file's position
                    self._zip, self._process = zipfile.ZipFile(self.root), os.getpid()
                return self._zip.read(member)
        except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, zlib.error) as error:
            raise DataError(
                f"{self.where(name)} is damaged or encrypted ({error}); fetch the zip again"
            ) from error
