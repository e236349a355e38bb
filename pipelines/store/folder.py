"""Image files: those of a folder, and those that a .csv file names."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.console import Tally, tally
from fastsiam.errors import DataError, NoImagesError, NoSplitError, in_a_line
from fastsiam.files import explained, reason
from fastsiam.kernels import library

from .base import IMAGE_ENDINGS, SPLIT_NAMES, NewChunk, Split, Store, is_image_name, warn_once
from .columns import LABELS
from .labels import number_classes, parse_labels
from .probe import Bytes

_STAT_THREADS, _STAT_CHUNK = 16, 512
"""Threads that ask for files' sizes, and files that each asks for at a time.

A network file system takes long to answer, but answers many at once.
"""
CSV = ".csv"
_PATH, _SPLIT = "path", "split"
"""Names of a list's columns."""
_LOOKED_FOR = 1000
"""Files of a list that are looked for when it is opened; of a longer list, evenly spread ones."""


class FileStore(Store):
    """Image files, each of which is opened when it is read.

    Args:
        root: where they come from, for messages.
        folder: that their names are relative to.
        names: paths of the files, below the folder or absolute.
        labels: (images,) of each, -1 for none.
        classes: names of the classes.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        names: Sequence[bytes],
        labels: NDArray[np.int64],
        classes: tuple[str, ...],
    ) -> None:
        self.root, self._folder, self.labels, self.classes = root, folder, labels, classes
        self._names = np.array(names)
        self._prefix = os.fsencode(folder)
        self._stats: NDArray[np.int64] | None = None

    def path(self, index: int) -> Path:
        """Return an image's file."""
        return self._folder / self.name(index)

    def name(self, index: int) -> str:
        """Return an image's path below the folder, or its absolute one."""
        return os.fsdecode(self._names[self.position(index)])

    def where(self, index: int) -> str:
        """Return an image's path, for messages."""
        return str(self.path(index))

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes."""
        try:
            with open(self._file(self.position(index)), "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"cannot read {self.path(index)}: {reason(error)}") from error

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the encoded bytes of several images, in memory from ``new_chunk``.

        Compiled code reads as many files as fit into a chunk. A file that is larger than a chunk,
        or cannot be read, is left to ``read``.
        """
        data: list[Bytes] = []
        while len(data) < len(indices):
            chunk = new_chunk()
            sizes = self._read_files(indices[len(data) :], chunk)
            for size in sizes:
                data.append(chunk[:size])
                chunk = chunk[size:]
            if not sizes:
                data.append(self.read(int(indices[len(data)])))
        return data

    def _read_files(self, indices: NDArray[np.int64], memory: memoryview) -> list[int]:
        """Read files one behind the other, as far as they fit; return the bytes of each."""
        names, which = self._names, np.ascontiguousarray(self.in_whole(indices), np.int64)
        sizes = np.empty(len(which), np.int64)
        count: int = library.kernels().fastsiam_read_files(
            self._prefix,
            library.at(names),
            names.itemsize,
            library.at(which),
            len(which),
            np.frombuffer(memory, np.uint8).ctypes.data,
            len(memory),
            library.at(sizes),
        )
        done: list[int] = sizes[:count].tolist()
        return done

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,); 0 where a file is not there any more."""
        if self._whole is not None:
            return self._whole.sizes()[self.positions]
        return self._stat()[:, 0]

    def stamp(self) -> str:
        """Return a text that changes with the files' names, sizes and modification times."""
        parts = (self._names.tobytes(), self.labels.tobytes(), self._stat().tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _stat(self) -> NDArray[np.int64]:
        files = len(self._names)

        def stat(first: int) -> None:
            for index in range(first, min(first + _STAT_CHUNK, files)):
                with contextlib.suppress(OSError):
                    found = os.stat(self._file(index))
                    stats[index] = found.st_size, found.st_mtime_ns

        if self._stats is None:
            stats = np.zeros((files, 2), np.int64)
            with (
                tally(f"looking at files of {self.root}", files) as done,
                ThreadPoolExecutor(_STAT_THREADS) as pool,
            ):
                for _ in pool.map(stat, range(0, files, _STAT_CHUNK)):
                    done.add(min(_STAT_CHUNK, files - done.done))
            self._stats = stats
        return self._stats

    def _file(self, position: int) -> bytes:
        return os.path.join(self._prefix, self._names[position])


class FolderStore(FileStore):
    """Image files of a folder.

    With class folders (at any depth below them, as in torchvision's ``ImageFolder``), the label is
    the position of the class folder's name among the sorted names. Without, every label is -1.

    Raises:
        DataError: the folder cannot be listed, holds no images, or holds some in class folders and
            some beside them.
    """

    kind = "files of a folder"
    repair = "repair or remove the file"

    def __init__(self, root: Path) -> None:
        broken: list[str] = []
        with tally(f"listing {root}, files and folders") as listed:
            names = [*_walk(root, listed, broken)]
        if broken:
            warn_once(
                f"{root} has links to images that are not there, which are left out: "
                f"{len(broken):,}, such as {broken[0]}"
            )
        if not names:
            raise NoImagesError(
                f"{root} holds no images (looked for {', '.join(IMAGE_ENDINGS)}, in it and below)"
            )
        counts = {
            os.fsdecode(folder): sum(1 for _ in own)
            for folder, own in groupby(names, lambda name: name[: max(0, name.find(b"/"))])
        }
        labels = np.repeat(np.arange(len(counts)), [*counts.values()])
        if counts.pop("", 0):
            if counts:
                raise DataError(
                    f"{root} holds images both by themselves ({os.fsdecode(names[0])}) and in "
                    f"folders ({next(iter(counts))}/); move the first into class folders, "
                    "or point --data at a folder that has only one kind"
                )
            labels -= 1  # no class
        super().__init__(root, root, names, labels, tuple(counts))


def _walk(root: Path, listed: Tally, broken: list[str]) -> Iterator[bytes]:
    """Yield the paths below ``root`` of the images in each folder, before those of its folders.

    Both are sorted. Hidden ones are left out. Paths of images that are links to files that are not
    there are appended to ``broken``.
    """
    # Each folder with those that were left for it through links: a link back to them is a loop.
    waiting: list[tuple[str, tuple[str, ...]]] = [("", ())]
    while waiting:
        folder, left = waiting.pop()
        here, images = root / folder, []
        folders: dict[str, tuple[str, ...]] = {}
        with explained(DataError, f"cannot list {here}"), os.scandir(here) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink() and not os.path.exists(entry.path):
                    if is_image_name(entry.name):
                        broken.append(entry.path)
                elif is_image_name(entry.name) and entry.is_file():
                    images.append(entry.name)
                elif entry.is_dir():
                    own = (*left, os.path.realpath(here)) if entry.is_symlink() else left
                    if not (entry.is_symlink() and _leads_back(entry.path, own)):
                        folders[entry.name] = own
        listed.add(len(images) + len(folders))
        yield from (os.fsencode(f"{folder}{name}") for name in sorted(images))
        waiting += [(f"{folder}{name}/", folders[name]) for name in sorted(folders, reverse=True)]


def _leads_back(link: str, folders: Sequence[str]) -> bool:
    """Tell whether a link leads to one of these folders, or to one above it."""
    target = os.path.realpath(link)
    return any(os.path.commonpath([target, folder]) == target for folder in folders)


class ListedStore(FileStore):
    """Image files that a list names, in its order; one may be named several times.

    Paths are relative to the list's folder, or absolute. Labels are integers or names of classes.
    A column ``split`` tells which rows are training images; without it, all are.

    Args:
        path: the list.
        split: rows to take.
        names: columns that the user named; ``image`` is the one of the paths.

    Raises:
        NoSplitError: no row is of the split.
        DataError: the list cannot be read, has no column of paths or no rows, or names files that
            are not there; of a long list only some files are looked for.
    """

    kind = "files of a list"
    repair = "repair the file or remove its row"

    def __init__(self, path: Path, split: Split, names: ColumnNames = AUTOMATIC) -> None:
        columns = _read_csv(path, names)
        paths = columns[names.image or _PATH]
        if not paths:
            raise DataError(f"{path} names no images: it has no rows")
        taken = _of_split(path, len(paths), columns.get(_SPLIT), split)
        files = [os.fsencode(paths[row]) for row in taken.tolist()]
        for row, file in zip(taken.tolist(), files, strict=True):
            if not file or b"\0" in file:
                raise DataError(f"{path} has no path in row {row + 1:,}: remove the row")
        label = names.label or next((name for name in LABELS if name in columns), "")
        texts = [text.strip() for text in columns[label]] if label else [""] * len(paths)
        labels, classes = number_classes(parse_labels(texts), path)
        super().__init__(path, path.parent, files, labels[taken], classes)
        self._check_files()

    def _check_files(self) -> None:
        """Raise a ``DataError`` if files are not there; of a long list look for some."""
        some = np.unique(np.linspace(0, len(self) - 1, min(len(self), _LOOKED_FOR), dtype=int))
        there = [os.path.isfile(self._file(index)) for index in some.tolist()]
        if all(there):
            return
        raise DataError(
            f"{self.root} names files that are not there: {there.count(False):,} of {len(some):,} "
            f"that were looked for, the first {self.path(int(some[there.index(False)]))}; relative "
            "paths begin at the list's folder"
        )


def _of_split(
    path: Path, rows: int, splits: Sequence[str] | None, split: Split
) -> NDArray[np.int64]:
    """Return which rows are of a split, ascending."""
    if splits is None:
        if split == "train":
            return np.arange(rows)
        raise NoSplitError(f"{path} has no validation images: it has no column {_SPLIT!r}")
    own = np.array([name.strip().lower() for name in splits])
    for name in SPLIT_NAMES[split]:
        if len(taken := np.flatnonzero(own == name)):
            return taken
    known = ", ".join(repr(str(name)) for name in np.unique(own)[:5])
    wanted = " or ".join(SPLIT_NAMES[split])
    raise NoSplitError(f"{path} has no row whose {_SPLIT} is {wanted}, only {known}")


def _read_csv(path: Path, names: ColumnNames) -> dict[str, list[str]]:
    """Read the columns of a CSV file in UTF-8 whose first line names them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            for name, option in ((names.image or _PATH, "image"), (names.label, "label")):
                if name and name not in header:
                    raise DataError(
                        f"{path} has no column {name!r}, only "
                        f"{in_a_line(', '.join(header)) or 'none'}: name the columns in its first "
                        f"line, or pass --{option}-column NAME"
                    )
            rows: list[list[str]] = []
            for line in lines:
                if len(line) == len(header):
                    rows.append(line)
                elif line:
                    raise DataError(
                        f"{path} has {len(line)} fields in line {lines.line_num:,} and "
                        f"{len(header)} in its first: put quotes around a field with commas"
                    )
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in UTF-8: save it in UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} is damaged in line {lines.line_num:,}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}
