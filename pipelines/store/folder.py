"""Data sets of individual image files: a folder of images, or the files listed in a .csv."""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.console import Tally, format_count, tally
from fastsiam.errors import DataError, NoImagesError, NoSplitError, as_one_line
from fastsiam.files import os_errors_as, reason
from fastsiam.kernels import library

from .base import IMAGE_ENDINGS, NewChunk, Store, is_hidden, warn_once
from .labels import LABELS, number_classes, parse_labels
from .probe import Bytes
from .splits import ALL_SPLIT_NAMES, SPLIT_NAMES, Split

_THREADS, _STAT_CHUNK = 16, 512
"""Number of threads that list folders or stat files, and files per task of the latter.

Network file systems have a high latency, but answer many requests in parallel.
"""
_LISTING_BYTES = 1 << 21
"""Size of the buffer for the names of a folder's images: enough for 90,000. If they need more, the
folder is listed again."""
CSV = ".csv"
_PATH, _SPLIT = "path", "split"
"""Default column names of a list."""
_OTHER_FORMATS = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".gif", ".psd", ".svg",
    ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2",
)  # fmt: skip
"""Extensions of image formats that are not read, so that a folder's listing can name them."""
_MOST_CHECKS = 1000
"""Maximum number of files, spread evenly over a list, that are checked when it is opened."""


class FileStore(Store):
    """Image files, each opened when it is read.

    Args:
        root: the folder or list that the files come from, for messages.
        folder: the folder that ``names`` are relative to.
        names: paths of the files, relative to ``folder`` or absolute.
        labels: (images,) label of each image, -1 for none.
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
        self.root, self.labels, self.classes = root, labels, classes
        self._names = np.array(names)
        self._prefix = os.fsencode(folder)

    def path(self, index: int) -> Path:
        """Return the path of an image's file."""
        return Path(os.fsdecode(self._file(self.position(index))))

    def name(self, index: int) -> str:
        """Return an image's path as it was passed: relative to the folder, or absolute."""
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
        """Return the encoded bytes of several images, in buffers from ``new_chunk``.

        Compiled code reads as many files as fit into a buffer. ``read`` handles files that are
        larger than a buffer or cannot be read.
        """
        data: list[Bytes] = []
        positions = np.ascontiguousarray(self.full_positions(indices), np.int64)
        sizes = np.empty(len(positions), np.int64)
        while len(data) < len(positions):
            chunk, waiting = new_chunk(), positions[len(data) :]
            count = library.kernels().fastsiam_read_files(
                self._prefix,
                library.at(self._names),
                self._names.itemsize,
                library.at(waiting),
                len(waiting),
                np.frombuffer(chunk, np.uint8).ctypes.data,
                len(chunk),
                library.at(sizes),
            )
            for size in sizes[:count].tolist():
                data.append(chunk[:size])
                chunk = chunk[size:]
            if not count:
                data.append(self.read(int(indices[len(data)])))
        return data

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each image in bytes: (images,).

        Raises:
            DataError: a file no longer exists, or cannot be read.
        """
        if self._whole is not None:
            return self._whole.sizes()[self.positions]
        return self._stats[:, 0]

    def stamp(self) -> str:
        """Return a fingerprint of the files: their names, labels, sizes and modification times.

        Raises:
            DataError: a file no longer exists, or cannot be read.
        """
        parts = (self._names.tobytes(), self.labels.tobytes(), self._stats.tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @cached_property
    def _stats(self) -> NDArray[np.int64]:
        """(files, 2): the size in bytes and the modification time (ns) of each file."""
        files = len(self._names)
        stats = np.empty((files, 2), np.int64)

        def stat(first: int) -> None:
            for index in range(first, min(first + _STAT_CHUNK, files)):
                file = self._file(index)
                try:
                    status = os.stat(file)
                except OSError as error:
                    raise DataError(f"cannot read {os.fsdecode(file)}: {reason(error)}") from error
                stats[index] = status.st_size, status.st_mtime_ns

        with (
            tally(f"checking files of {self.root}", files) as progress,
            ThreadPoolExecutor(_THREADS) as pool,
        ):
            for _ in pool.map(stat, range(0, files, _STAT_CHUNK)):
                progress.add(min(_STAT_CHUNK, files - progress.done))
        return stats

    def _file(self, position: int) -> bytes:
        return os.path.join(self._prefix, self._names[position])


class FolderStore(FileStore):
    """The image files of a folder, optionally in class folders.

    With class folders, images may be at any depth below them, as in torchvision's ``ImageFolder``,
    and labels are indices of the sorted folder names. Without class folders, every label is -1.

    Raises:
        DataError: the folder cannot be listed, contains no images, or contains images both inside
            and outside class folders.
    """

    kind = "folder of image files"
    repair = "repair or remove the file"

    def __init__(self, root: Path) -> None:
        broken_links, others = list[str](), Counter[str]()
        names, counts = list[bytes](), Counter[str]()
        with tally(f"listing {root}, files and folders") as progress:
            for folder, images in _walk(root, progress, broken_links, others):
                counts[folder.partition("/")[0]] += len(images)
                names += os.fsencode(folder + f"\0{folder}".join(images)).split(b"\0")
        if others:
            formats = ", ".join(f"{count:,} {ending}" for ending, count in others.most_common())
            warn_once(
                f"{root} has images of formats that are not read: {formats}; convert them to JPEG "
                "or PNG"
            )
        if broken_links:
            warn_once(
                f"{root} has broken links to images or folders, which are skipped: "
                f"{len(broken_links):,}, such as {as_one_line(broken_links[0])}"
            )
        if not names:
            raise NoImagesError(
                f"{root} holds no images ({', '.join(IMAGE_ENDINGS)}), nor do its subfolders"
            )
        labels = np.repeat(np.arange(len(counts)), [*counts.values()])
        if counts.pop("", 0):
            if counts:
                raise DataError(
                    f"{root} holds images both outside folders ({os.fsdecode(names[0])}) and in "
                    f"folders ({next(iter(counts))}/); move the former into class folders, "
                    "or point --data at a folder that has only one kind"
                )
            labels -= 1  # from 0 to -1: unlabelled
        super().__init__(root, root, names, labels, tuple(counts))


def _walk(
    root: Path, progress: Tally, broken_links: list[str], others: Counter[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder that has images, and the sorted names of these images.

    Folders are "" for ``root`` or a relative path that ends with a slash. A folder comes before its
    subfolders, which are sorted. Hidden files and folders are skipped. Broken image links are
    skipped and appended to ``broken_links``. Images of other formats are skipped and counted in
    ``others`` by extension.
    """
    pool = ThreadPoolExecutor(_THREADS)
    list_images = partial(_list_images, library.compiled_kernels())
    # Each folder, with the folders of the links followed to it (a link back to these is a loop) and
    # its listing.
    waiting: list[tuple[str, tuple[str, ...], Future[list[str] | None]]]
    waiting = [("", (), pool.submit(list_images, root))]
    try:
        while waiting:
            folder, links, listing = waiting.pop()
            here, folders = root / folder, dict[str, tuple[str, ...]]()
            images = listing.result()
            if images is None:
                images, folders = _scan(here, links, broken_links, others)
            progress.add(len(images) + len(folders))
            if images:
                yield folder, sorted(images)
            waiting += reversed(
                [
                    (f"{folder}{name}/", folders[name], pool.submit(list_images, here / name))
                    for name in sorted(folders)
                ]
            )
    finally:  # wait only at the end, before other code forks, and not for folders after an error
        pool.shutdown(wait=not waiting, cancel_futures=True)


def _list_images(kernels: Any, folder: Path) -> list[str] | None:
    """Return the names of a folder's images, in any order.

    Compiled code lists a folder in a fraction of the time that Python takes, without the GIL.

    Returns:
        The names; None if the folder has anything else that is not hidden, or cannot be listed.
    """
    if kernels is None:
        return None
    path, endings = os.fsencode(folder), "\0".join((*IMAGE_ENDINGS, "")).encode()
    size, names = _LISTING_BYTES, np.empty(0, np.uint8)
    while size > len(names):
        names = np.empty(size, np.uint8)
        size = kernels.fastsiam_list_images(path, endings, library.at(names), len(names))
    return None if size < 0 else os.fsdecode(names[:size].tobytes()).split("\0")[:-1]


def _scan(
    folder: Path, links: tuple[str, ...], broken_links: list[str], others: Counter[str]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the names of a folder's images, and its subfolders with the links followed to them."""
    images, folders = list[str](), dict[str, tuple[str, ...]]()
    with os_errors_as(DataError, f"cannot list {folder}"), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if is_hidden(name):
                continue
            is_image = name.lower().endswith(IMAGE_ENDINGS)
            if entry.is_symlink() and not os.path.exists(entry.path):
                if is_image or (not os.path.splitext(name)[1] and is_broken(entry.path)):
                    broken_links.append(entry.path)
            elif is_image and entry.is_file():
                images.append(name)
            elif entry.is_dir():
                entry_links = (*links, os.path.realpath(folder)) if entry.is_symlink() else links
                if not (entry.is_symlink() and _leads_back(entry.path, entry_links)):
                    folders[name] = entry_links
            elif name.lower().endswith(_OTHER_FORMATS):
                others[os.path.splitext(name)[1].lower()] += 1
    return images, folders


def is_broken(link: str | Path) -> bool:
    """Return whether the target of a link is missing. A link that leads to itself is not broken."""
    return not os.path.lexists(os.path.realpath(link))


def _leads_back(link: str, folders: Sequence[str]) -> bool:
    """Return whether a link points to one of these folders or to a parent of one."""
    target = os.path.realpath(link)
    return any(os.path.commonpath([target, folder]) == target for folder in folders)


class ListedStore(FileStore):
    """The image files listed in a .csv, in the order of its rows; a file may be listed repeatedly.

    Paths are absolute, or relative to the list's folder. ``names.image`` is their column. Labels
    are integers or class names. The column ``split`` assigns rows to splits; without it, all images
    are training images.

    Raises:
        NoSplitError: no row belongs to the split.
        DataError: the list cannot be read, has no path column or no rows, or lists missing files.
            If it has more than 1,000 rows, a sample of the files is checked.
    """

    kind = "list of image files"
    repair = "repair the file or remove its row"

    def __init__(self, path: Path, split: Split, names: ColumnNames = AUTOMATIC) -> None:
        columns = _read_csv(path, names)
        paths = columns[names.image or _PATH]
        if not paths:
            raise DataError(f"{path} lists no images: it has no rows")
        rows = _of_split(path, len(paths), columns.get(_SPLIT), split)
        files = [os.fsencode(paths[row]) for row in rows.tolist()]
        for row, file in zip(rows.tolist(), files, strict=True):
            if not file or b"\0" in file:
                raise DataError(f"{path} has no path in row {row + 1:,}: remove the row")
        label = names.label or next((name for name in LABELS if name in columns), "")
        texts = [text.strip() for text in columns[label]] if label else [""] * len(paths)
        labels, classes = number_classes(parse_labels(texts), path)
        super().__init__(path, path.parent, files, labels[rows], classes)
        sample = np.unique(np.linspace(0, len(self) - 1, min(len(self), _MOST_CHECKS), dtype=int))
        missing = [index for index in sample.tolist() if not os.path.isfile(self._file(index))]
        if missing:
            raise DataError(
                f"{path} lists files that do not exist: {len(missing):,} of "
                f"{len(sample):,} that were checked, the first {self.path(missing[0])}; paths are "
                "absolute, or relative to the list's folder"
            )


def _of_split(
    path: Path, rows: int, splits: Sequence[str] | None, split: Split
) -> NDArray[np.int64]:
    """Return the row numbers of a split, ascending."""
    if splits is None:
        if split == "train":
            return np.arange(rows)
        raise NoSplitError(f"{path} has no validation images: it has no column {_SPLIT!r}")
    row_splits = np.array([name.strip().lower() for name in splits])
    unused = np.flatnonzero(~np.isin(row_splits, ALL_SPLIT_NAMES))
    if len(unused):
        warn_once(
            f"{path} has {format_count(len(unused), 'row')} that no split uses, such as row "
            f"{unused[0] + 1:,} with {_SPLIT} {str(row_splits[unused[0]])!r}; the names of splits "
            f"are {', '.join(ALL_SPLIT_NAMES)}"
        )
    for name in SPLIT_NAMES[split]:
        if len(matches := np.flatnonzero(row_splits == name)):
            return matches
    examples = ", ".join(repr(str(name)) for name in np.unique(row_splits)[:5])
    names = " or ".join(SPLIT_NAMES[split])
    raise NoSplitError(f"{path} has no row whose {_SPLIT} is {names}, only {examples}")


def _read_csv(path: Path, names: ColumnNames) -> dict[str, list[str]]:
    """Read a UTF-8 CSV file with a header line; return its columns by name."""
    try:
        with (
            os_errors_as(DataError, f"cannot read {path}"),
            path.open(encoding="utf-8-sig", newline="") as file,
        ):
            lines = csv.reader(file, skipinitialspace=True, strict=True)
            header = [name.strip() for name in next(lines, [])]
            if not any(header):
                raise DataError(f"{path} must name its columns in its first line, which is empty")
            for name, option in ((names.image or _PATH, "image"), (names.label, "label")):
                if name and name not in header:
                    raise DataError(
                        f"{path} has no column {name!r}, only {as_one_line(', '.join(header))}: "
                        f"name the columns in its first line, or pass --{option}-column NAME"
                    )
            for name in (names.image or _PATH, names.label, *LABELS, _SPLIT):
                if name and header.count(name) > 1:
                    raise DataError(f"{path} has several columns named {name}: rename all but one")
            rows: list[list[str]] = []
            for line in lines:
                if len(line) == len(header):
                    rows.append(line)
                elif line:
                    raise DataError(
                        f"{path} has {len(line)} fields in line {lines.line_num:,} but "
                        f"{len(header)} in its first line: quote fields that contain commas"
                    )
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} is damaged in line {lines.line_num:,}: {error}") from error
    return {name: [row[column] for row in rows] for column, name in enumerate(header)}
