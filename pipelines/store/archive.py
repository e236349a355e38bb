"""Images in tar files, read in place through an index that is built once.

Supports plain tars, WebDataset shards and tars of tars, such as ImageNet's official archive.
Several processes index local tars in parallel. Remote tars are read sequentially, several at a
time: seeking from header to header would cost a round trip per member.
"""

from __future__ import annotations

import io
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import format_count, tally
from fastsiam.errors import DataError, NoImagesError

from ..remote.path import Place
from ..workers import process_pool
from .base import PlacedStore, is_image_name, warn_once
from .decode import ImageRules
from .index import ROW, Index, fingerprint, open_index, pack_texts, source_name, unpack_texts
from .labels import number_classes, parse_labels
from .mapped_files import File, FileReader, Mapped, open_file
from .probe import Bytes, Flags, probe
from .splits import SPLIT_NAMES

_WNID = re.compile(r"n\d{8}")
_LARGEST_CLASS_FILE = 1024
_LARGEST_IMAGE = 2**32 - 1
"""An index row stores an image's size in 32 bits."""
_LARGEST_READ = 2**20
"""Limit on reads of tar headers, in bytes, whatever size a corrupt header claims."""
_BLOCK, _MAGIC = tarfile.BLOCKSIZE, b"ustar"
"""Block size of tars, and the magic string in POSIX and GNU tar headers."""
_SMALL_BYTES = 2**28
"""Local tars of fewer bytes in total are indexed by one process, without starting others."""
_REMOTE_TARS = 8
"""Number of remote tars that are read concurrently."""
_HEADER_BUFFER, _SCAN_BUFFER = 2**15, 2**25
"""Buffer sizes for remote tars, in bytes: for finding inner tars, and for reading sequentially."""


class ArchiveStore(PlacedStore):
    """Images of one or more tar files, read in place.

    If any image has a WebDataset sibling ``key.cls``, these files contain the labels. Otherwise an
    image's class is the name of its inner tar in a tar of tars, the name of its tar if that is a
    WordNet id, or else its top folder in the tar, below the parents that all images share. Images
    without a class have the label -1.

    Images are sorted by class and name, like those of a folder.

    Raises:
        DataError: a tar cannot be read, is corrupt or compressed, contains several splits, or there
            are no images.
    """

    kind = "tar, read in place"

    def __init__(self, paths: Sequence[Place]) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].parent
        files = [open_file(path) for path in paths]
        index = open_index(files, partial(build_index, files))
        if not len(index["rows"]):
            raise NoImagesError(f"{source_name(paths)} holds no images")
        self.classes, self._packed = tuple(unpack_texts(index["classes"])), index["names"]
        self._rows = rows = index["rows"]
        self.labels = rows["label"].astype(np.int64)
        self.width, self.height = rows["width"], rows["height"]
        self._set_places(files, rows["file"], rows["offset"], rows["size"])

    def name(self, index: int) -> str:
        """Return an image's path within the tar, without the parents that all images share."""
        return self._names[self.position(index)]

    def where(self, index: int) -> str:
        """Return an image's name, tar, size and offset, for messages."""
        path = self.files[self.file[index]].path
        return (
            f"{self.name(index)} (in {path}, {self.size[index]:,} bytes at {self.start[index]:,})"
        )

    def set_rules(self, rules: ImageRules) -> None:
        """Set the decoding rules; sizes are then unknown if some images will be rotated."""
        super().set_rules(rules)
        if rules.exif == "apply" and (self._rows["flags"] & Flags.ROTATED).any():
            self.width = self.height = None  # the index does not store the orientation

    def stamp(self) -> str:
        """Return a fingerprint of the tars (names, sizes, modification times) and of the index."""
        return fingerprint([file.path for file in self.files], rows=self._rows.tobytes())

    @cached_property
    def _names(self) -> list[str]:
        return unpack_texts(self._packed)


class _Part(NamedTuple):
    """A tar, or a tar within a tar: the unit of parallel indexing."""

    file: int
    """Index of the file."""
    start: int
    end: int
    """Byte range of the tar in the file."""
    group: str
    """Class name derived from the tar's name, or ""."""


_PartImages = tuple[NDArray[np.void], list[str], list[str]]
"""Rows, names and label texts of a part's images, in the order of its members; see ``_arrange``."""


def build_index(files: Sequence[File], source: str) -> Index:
    """Index all images in a set of tars, which are all local or all remote; see ``_arrange``.

    Raises:
        DataError: a tar is corrupt or compressed, or the tars contain several splits or invalid
            labels.
    """
    stop_event, is_local = threading.Event(), isinstance(files[0], Mapped)

    def reader(file: File, end: int, at_once: int) -> Callable[[int, int], Bytes]:
        """Return a function that reads a byte range, through a buffer if the file is remote."""
        if is_local:
            return file.read
        stream = io.BufferedReader(FileReader(file.read, 0, end), at_once)

        def read(start: int, stop: int) -> bytes:
            if stop_event.is_set():  # another tar failed
                raise CancelledError
            stream.seek(start)
            return stream.read(stop - start)

        return read

    def find(number: int) -> list[_Part]:
        file = files[number]
        return _parts(number, file, reader(file, len(file), _HEADER_BUFFER))

    def scan(part: _Part) -> _PartImages:
        file = files[part.file]
        return _scan(file, part, reader(file, part.end, _SCAN_BUFFER))

    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(_REMOTE_TARS))
        stack.callback(stop_event.set)
        run: Callable[..., Iterable[Any]] = map if is_local else threads.map
        parts = list(chain(*run(find, range(len(files)))))
        progress = stack.enter_context(tally(f"indexing {source}, tars", len(parts)))
        results: Iterable[_PartImages]
        if is_local and sum(map(len, files)) >= _SMALL_BYTES:
            results = stack.enter_context(process_pool(-1, scan))(parts)
        else:
            results = run(scan, parts)
        images = []
        for result in results:
            images.append(result)
            progress.add()
    rows, names, texts = zip(*images, strict=True)
    return _arrange(np.concatenate(rows), [*chain(*names)], [*chain(*texts)], source)


def _parts(number: int, file: File, read: Callable[[int, int], Bytes]) -> list[_Part]:
    """Return the tars within a tar, or the tar itself if it is not a tar of tars."""
    if bytes(file.read(0, 2)) == b"\x1f\x8b":  # gzip
        raise DataError(
            f"{file.path} is compressed, so it cannot be read in place: gunzip it and pass the .tar"
        )
    inner = []
    for name, start, size in _members(read, 0, len(file), file.path):
        path = PurePosixPath(name)
        if path.suffix == ".tar":
            inner.append(_Part(number, start, start + size, path.stem))
        elif is_image_name(path.name):
            inner.clear()  # a tar of images; ``_scan`` skips tars among them
            break
    stem = file.path.stem
    return inner or [_Part(number, 0, len(file), stem if _WNID.fullmatch(stem) else "")]


def _scan(file: File, part: _Part, read: Callable[[int, int], Bytes]) -> _PartImages:
    """Index a part's images. The last of several members with one name wins, as in ``tar -x``."""
    rows: dict[str, tuple[int, ...]] = {}
    texts: dict[str, str] = {}
    for path, start, size in _members(read, part.start, part.end, file.path):
        name = PurePosixPath(path).name
        if name.endswith(".cls") and size < _LARGEST_CLASS_FILE:
            text = bytes(read(start, start + size)).decode("utf-8", "replace")
            texts[_sample(path)] = text.strip()
        elif is_image_name(name):
            try:
                head = probe(read(start, start + size))
                facts = head.width, head.height, head.flags
                if max(facts[:2]) > 0xFFFF:  # does not fit into a row: size unknown
                    facts = 0, 0, head.flags
            except ValueError:
                facts = 0, 0, Flags.BAD
            rows[path] = start, size, -1, part.file, *facts
    names = [f"{part.group}/{PurePosixPath(path).name}" if part.group else path for path in rows]
    return np.array([*rows.values()], ROW), names, [texts.get(_sample(path), "") for path in rows]


def _sample(path: str) -> str:
    """Return a WebDataset sample's key: the path up to the first dot of the file name."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/{name.split('.', 1)[0]}"


def _arrange(rows: NDArray[np.void], names: list[str], texts: list[str], source: str) -> Index:
    """Label the images and sort them in the order of an equivalent folder.

    Args:
        rows: (images,) of type ROW, without labels.
        names: (images,) path of each image within its tar.
        texts: (images,) content of each image's .cls file, "" if it has none.
        source: description of the tars, for messages.
    """
    if not names:  # kept too, so that such tars are not searched at every start
        return {"rows": rows, "names": pack_texts([]), "classes": pack_texts([])}
    paths = [name.split("/") for name in names]
    # Drop the parent folders that all images share, but keep the last level: it is the class.
    folders = {tuple(parts[:-1]) for parts in paths}
    deepest = max(map(len, folders))
    same = [one == other for one, other in zip(min(folders), max(folders), strict=False)]
    shared = max(0, min([*same, False].index(False), deepest - 1))
    tops = {parts[shared] for parts in paths if len(parts) > shared + 1}
    lower = {top.lower() for top in tops}
    held_out = lower.intersection(SPLIT_NAMES["val"])
    has_train = "train" in lower or ("training" in lower and held_out)  # alone it may be a class
    if len(tops) > 1 and (has_train or len(held_out) > 1):
        raise DataError(
            f"{source} holds folders {', '.join(f'{top}/' for top in sorted(tops)[:3])}, which are "
            "splits: unpack it, or create one tar per split, train.tar and val.tar"
        )
    keys = zip(rows["file"].tolist(), map(_sample, names), strict=True)
    samples = Counter(key for key, text in zip(keys, texts, strict=True) if text)
    if several := [sample for (_, sample), count in samples.items() if count > 1]:
        warn_once(
            f"{source} has {format_count(len(several), 'sample')} with several images, such as "
            f"{several[0]}.*; all of them are used, also masks and depth maps"
        )
    labels = parse_labels(texts)  # ImageNet's WebDataset shards contain numbers
    if not any(texts):  # use the first folder below the shared parents
        labels = [parts[shared] if len(parts) > shared + 1 else None for parts in paths]
    rows["label"], classes = number_classes(labels, source)
    names = ["/".join(parts[shared:]) for parts in paths]
    order = sorted(range(len(names)), key=[_files_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(rows["label"][order], kind="stable")]
    return {
        "rows": rows[order],
        "names": pack_texts([names[i] for i in order]),
        "classes": pack_texts(classes),
    }


def _files_first(name: str) -> str:
    """Return a sort key that puts a folder's files before its subfolders, like ``FolderStore``."""
    folder, _, file_name = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + file_name


def _members(
    read: Callable[[int, int], Bytes], start: int, end: int, path: Place
) -> Iterator[tuple[str, int, int]]:
    """Yield the path, offset and size of each visible regular file of a tar.

    This is stricter than Python's tarfile, which takes a corrupt header for the end of the tar and
    accepts members that extend beyond the file.

    Raises:
        DataError: the tar is corrupt or truncated, or contains members that cannot be read in
            place: links to images, sparse files, or images of 4 GiB or more.
    """

    def read_little(first: int, last: int) -> Bytes:
        return read(first, min(last, first + _LARGEST_READ))

    try:
        with tarfile.open(fileobj=FileReader(read_little, start, end), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # saves memory
                offset = start + member.offset_data
                # relative to the folder: "../a" is a
                name = "/".join(x for x in member.name.split("/") if x not in ("", ".", ".."))
                is_hidden = name.startswith(".") or "/." in name  # skipped, as in folders
                is_image = not is_hidden and is_image_name(PurePosixPath(name).name)
                reason = ""
                if member.islnk() or member.issym():
                    option = "--dereference" if member.issym() else "--hard-dereference"
                    reason = f"is a link to {member.linkname}; create the tar with tar {option}"
                elif member.sparse is not None:
                    reason = "is stored as a sparse file; create the tar without --sparse"
                elif member.size > _LARGEST_IMAGE:
                    reason = (
                        f"has {member.size:,} bytes, but the limit is {_LARGEST_IMAGE:,}; "
                        "create the tar without it"
                    )
                if reason and (is_image or member.sparse is not None):
                    raise DataError(f"{path} cannot be read in place: {member.name} {reason}")
                if member.isreg() and (member.size < 0 or offset + member.size > end):
                    raise tarfile.ReadError("unexpected end of data")
                if member.isreg() and not is_hidden:
                    yield name, offset, member.size
            # tarfile stops at a corrupt header without an error; a complete tar ends with zeros.
            place = start + tar.offset
            rest = bytes(read_little(place, end))
            if len(rest) < _BLOCK or any(rest[:_BLOCK]):
                raise tarfile.ReadError(f"damaged or truncated after {place:,} bytes")
            if _MAGIC in rest:
                raise DataError(
                    f"{path} has another tar after its end, at byte {place:,}, as joined by cat: "
                    "keep the tars as files in a folder, or join them with tar --concatenate"
                )
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} is not a complete tar file ({error}); fetch it again, or check it with tar -tf"
        ) from error
