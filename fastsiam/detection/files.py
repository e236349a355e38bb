"""Files of a data set by name, in folders, tars and zips: all are read where they are."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from fastsiam.errors import DataError
from fastsiam.files import explained
from fastsiam.pipelines.store.files import Mapped
from fastsiam.pipelines.store.tar import members, safe_name

LARGEST_FILE = 2**28
"""Bytes of the largest file that is read, COCO's annotations apart."""
_HEADER = struct.Struct("<4s22xHH")
"""Of a zip's member: its mark, 22 bytes that the directory repeats, lengths of name and extra."""
_ENCRYPTED = 1


class Files(ABC):
    """Files by names such as ``VOC2007/JPEGImages/000005.jpg``."""

    root: Path
    """Where they lie, for messages."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""

    @abstractmethod
    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes.

        Raises:
            DataError: it is not there, cannot be read, or has more than ``limit`` bytes.
        """

    @abstractmethod
    def stamp(self, names: Iterable[str]) -> str:
        """Return a text that changes when these files do (names, sizes, modification times)."""

    def where(self, name: str) -> str:
        """Return where a file lies, for messages."""
        return f"{self.root}: {name}"

    def _too_large(self, name: str, size: int) -> DataError:
        return DataError(f"{self.where(name)} has {size:,} bytes, too large for what it is")


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
            if found.st_size > limit:
                raise self._too_large(name, found.st_size)
            return file.read(found.st_size)

    def stamp(self, names: Iterable[str]) -> str:
        """Return a text that changes when these files do."""
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


class Archive(Files):
    """Files of a tar or a zip, which is mapped.

    Raises:
        DataError: it is damaged, cut, or holds what cannot be read in place.
    """

    def __init__(self, path: Path) -> None:
        self.root = path
        self._file = Mapped(path)

    def stamp(self, names: Iterable[str]) -> str:
        """Return a text that changes when the archive does."""
        with explained(DataError, f"cannot read {self.root}"):
            found = self.root.stat()
        return json.dumps([self.root.name, found.st_size, found.st_mtime_ns])

    def _taken(self, start: int, size: int) -> bytes:
        data = bytes(self._file.view[start : start + size])
        self._file.check()
        return data

    def _missing(self, name: str) -> DataError:
        return DataError(f"{self.root} holds no {name}")


class Tar(Archive):
    """Files of a tar.

    Args:
        path: the tar.
        tops: folders that the names begin with; what leads to the first of them is left out.
    """

    def __init__(self, path: Path, tops: tuple[str, ...]) -> None:
        super().__init__(path)
        self._places: dict[str, tuple[int, int]] = {}
        above: str | None = None
        for member, start in members(self._file.read, 0, len(self._file), path):
            name = safe_name(member.name)
            parts = name.split("/")
            if above is None and (top := next((part for part in parts if part in tops), None)):
                above = "".join(f"{part}/" for part in parts[: parts.index(top)])
            self._places[name] = start, member.size
        self._places = {
            name.removeprefix(above or ""): place for name, place in self._places.items()
        }

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        return name in self._places

    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes."""
        if name not in self._places:
            raise self._missing(name)
        start, size = self._places[name]
        if size > limit:
            raise self._too_large(name, size)
        return self._taken(start, size)


class Zip(Archive):
    """Files of a zip, stored or deflated."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with explained(DataError, f"cannot read {path}"), zipfile.ZipFile(path) as file:
                self._members = {safe_name(member.filename): member for member in file.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise DataError(
                f"{path} is no whole zip file ({error}); fetch it again, or check it with unzip -t"
            ) from error

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a file of that name."""
        return name in self._members and not self._members[name].is_dir()

    def read(self, name: str, limit: int = LARGEST_FILE) -> bytes:
        """Return a file's bytes, which have the checksum that the zip holds of them."""
        if name not in self:
            raise self._missing(name)
        member = self._members[name]
        if member.file_size > limit:
            raise self._too_large(name, member.file_size)
        try:
            data = self._unpacked(member)
        except (ValueError, struct.error, zlib.error) as error:
            raise DataError(
                f"{self.where(name)} is damaged ({error}); fetch the zip again"
            ) from error
        return data

    def _unpacked(self, member: zipfile.ZipInfo) -> bytes:
        """Return a member's bytes; ValueError, struct.error or zlib.error if it is damaged."""
        if member.flag_bits & _ENCRYPTED:
            raise ValueError("it is encrypted")
        start = member.header_offset
        mark, name, extra = _HEADER.unpack(self._taken(start, _HEADER.size))
        if mark != b"PK\3\4":
            raise ValueError("it has no header")
        data = self._taken(start + _HEADER.size + name + extra, member.compress_size)
        if member.compress_type == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.file_size + 1)
        elif member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed in another way than by deflate")
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise ValueError("its checksum is another")
        return data
