"""Images in tar files, read in place through an index that is built once.

Takes plain tars, WebDataset shards and tars of tars (ImageNet's official archive). Several
processes build the index. Tars on another machine are walked in threads, which wait for answers
most of the time. Of many, the headers of members and images are fetched alone; few are read from
their beginning to their end, because a walk from header to header waits for an answer at every
step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import tally
from fastsiam.errors import DataError, NoSplitError

from ..processes import AbandonedError
from ..remote import RemoteFile
from ..remote.file import Onward
from ..remote.path import Place
from ..remote.storage import PARALLEL
from .base import Split, is_image_name
from .files import File, open_file
from .index import ROW, Index, are_small, file_facts, open_index, pack_texts, unpack_texts
from .labels import number_classes
from .placed import PlacedStore
from .probe import Bytes, Flags, probe
from .tar import GZIP_MAGIC, gunzip, is_tar_name, members, safe_name
from .tasks import numbered

log = logging.getLogger(__name__)

_WNID = re.compile(r"n\d{8}")
_MIXED = "{path} holds both images and tars ({name}): unpack it, or make two of it"
_PACKED = struct.Struct("<QIiHHHH")
"""A row of the index, of type ROW."""
_LARGEST_CLASS_FILE = 1024
_HEADER_BYTES = 2**20
"""Of a gzipped image so much is decompressed to read its header."""
_HEADS = (2**12, 2**16)
"""Bytes of an image on another machine that are looked at first; then it is all of them."""
_HOP = 2**13
"""Bytes that are fetched at a member of a tar: its header and, as a rule, the image's."""
_MANY = 16
"""So many tars are walked from header to header, side by side; fewer are read as a whole."""
_LARGEST_UNZIPPED = 2**28


class ArchiveStore(PlacedStore):
    """Images of one or more tar files, in place.

    The label is, in this order: the WebDataset sibling ``key.cls``; the inner tar's name in a tar
    of tars; the folder within the tar (a common parent of all is left out, and ``train/`` and
    ``val/`` are taken for splits); the tar's own name if it is a WordNet id. Otherwise -1. Images
    are sorted by class and name, as those of a folder are.

    Args:
        paths: the tar files.
        split: which images, if the tars hold folders train/ and val/.
        of_split: if the tars hold no such folders, take all images, else none.

    Raises:
        NoSplitError: the tars hold no images of that split.
        DataError: a tar cannot be read, is damaged or compressed, or there is no image.
    """

    kind = "tar, read in place"
    columns = (*PlacedStore.columns, "flags", "width", "height", "_number")

    def __init__(
        self, paths: Sequence[Place], split: Split = "train", of_split: bool = True
    ) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].parent
        source = str(self.root) if len(paths) == 1 else f"{len(paths)} tars in {self.root}"
        files = [open_file(path) for path in paths]
        index = open_index(files, source, lambda _: build_index(files, source)).arrays
        self.classes, self._packed = tuple(unpack_texts(index["classes"])), index["names"]
        self._rows = index["rows"]
        self._number = np.arange(len(self._rows))
        """(images,) of each one's name, among those of both splits."""
        if index["split"]:
            held_out = (self._rows["flags"] & Flags.HELD_OUT) > 0
            self._number = np.flatnonzero(held_out == (split == "val"))
            self._rows = self._rows[self._number]
        if not len(self._rows) or not (index["split"] or of_split):
            raise NoSplitError(f"{source} holds no {split} images")
        self.labels = self._rows["label"].astype(np.int64)
        self.flags, self.width, self.height = (
            self._rows[name] for name in ("flags", "width", "height")
        )
        self._set_places(files, *(self._rows[name] for name in ("file", "offset", "size")))

    def name(self, index: int) -> str:
        """Return an image's path within the tar, without parents that all share."""
        return self._names[int(self._number[index])]

    def where(self, index: int) -> str:
        """Return an image's tar, place and name, for messages."""
        path = self._files[self.file[index]].path
        return (
            f"{self.name(index)} (in {path}, {self.size[index]:,} bytes at {self.start[index]:,})"
        )

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each image: (images, 2); None if some are to be turned."""
        if self.rules.exif == "apply" and (self.flags & Flags.ROTATED).any():
            return None  # the index does not say by how much
        return np.stack([self.height, self.width], axis=1).astype(np.int64)

    def stamp(self) -> str:
        """Return a text that changes with the tars, and with what was found in them."""
        text = json.dumps(file_facts(self._files))
        return hashlib.sha256(text.encode() + self._rows.tobytes()).hexdigest()

    def _unpack(self, index: int, data: Bytes) -> Bytes:
        """Decompress a gzipped image."""
        if not self.flags[index] & Flags.GZIP:
            return data
        try:
            image = gunzip(data, _LARGEST_UNZIPPED + 1)
        except DataError as error:
            raise self.cannot_decode(index, error) from error
        if len(image) > _LARGEST_UNZIPPED:
            raise self.cannot_decode(index, "unpacked it is above 256 MiB")
        return image

    def _are_plain(self, indices: NDArray[np.int64]) -> bool:
        return super()._are_plain(indices) and not (self.flags[indices] & Flags.GZIP).any()

    @cached_property
    def _names(self) -> list[str]:
        return unpack_texts(self._packed)


class _Part(NamedTuple):
    """A tar, or a tar within a tar: what one process walks at a time."""

    file: int
    """Number of the mapped file."""
    start: int
    end: int
    """Where the tar begins and ends within it."""
    group: str
    """Class that the tar's name gives its images, "" if it gives none."""


class _Found(NamedTuple):
    """The images of a part, in the order of its members."""

    rows: bytes
    """Rows of the index, without labels."""
    names: list[str]
    texts: list[str]
    """Content of the WebDataset .cls file beside each image, "" without one."""


def build_index(files: Sequence[File], source: str) -> Index:
    """Find all images of a set of tars.

    Args:
        files: the tars.
        source: their names, for messages.

    Raises:
        DataError: a tar is damaged or compressed, or what they hold is no data set.
    """
    remote = isinstance(files[0], RemoteFile)
    with ThreadPoolExecutor(PARALLEL if remote else 1) as pool:
        parts = [part for own in pool.map(_parts, range(len(files)), files) for part in own]
    if remote:
        found = _scan_in_threads(files, parts, source)
    elif are_small(files) or len(parts) == 1:
        with tally(f"indexing {source}, images") as images:
            found = [_scan(files, part, images.add) for part in parts]
    else:
        found = numbered(
            lambda number: _scan(files, parts[number]), len(parts), f"indexing {source}, tars"
        )
    rows = np.frombuffer(bytearray().join(part.rows for part in found), ROW)
    counts = {flag.name or "": int((rows["flags"] & flag > 0).sum()) for flag in Flags}
    if odd := ", ".join(f"{n:,} {name.lower()}" for name, n in counts.items() if n):
        log.info(f"odd images in {source}: {odd.replace('_', ' ')}")
    names = [name for part in found for name in part.names]
    return _arrange(rows, names, [text for part in found for text in part.texts], source)


def _parts(number: int, file: File) -> list[_Part]:
    """Find the tars within a tar; a tar that holds none is a part itself."""
    if file.read(0, 2) == GZIP_MAGIC:
        raise DataError(
            f"{file.path} is compressed, and so cannot be read in place: "
            "gunzip it and name the .tar"
        )
    inner = []
    for member, start in members(_reader(file, _HOP), 0, len(file), file.path):
        if is_tar_name(member.name):
            group = PurePosixPath(member.name).stem
            inner.append(_Part(number, start, start + member.size, group))
        elif is_image_name(PurePosixPath(member.name).name):
            if inner:
                raise DataError(_MIXED.format(path=file.path, name=member.name))
            break  # a tar of images; the workers walk it
    stem = file.path.stem
    return inner or [_Part(number, 0, len(file), stem if _WNID.fullmatch(stem) else "")]


def _scan_in_threads(files: Sequence[File], parts: list[_Part], source: str) -> list[_Found]:
    """Scan the parts of tars on another machine."""
    stopped = threading.Event()
    hop = _HOP if len(parts) >= _MANY else 0

    def note() -> None:
        if stopped.is_set():
            raise AbandonedError

    with (
        tally(f"indexing {source}, tars", len(parts)) as done,
        ThreadPoolExecutor(PARALLEL) as pool,
    ):
        waiting = [pool.submit(_scan, files, part, note, hop) for part in parts]
        try:
            for one in as_completed(waiting):
                one.result()
                done.add()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
    return [one.result() for one in waiting]


def _reader(file: File, hop: int) -> Callable[[int, int], Bytes]:
    """Return what reads a file by ranges that come one after the other."""
    return Onward(file, hop).read if isinstance(file, RemoteFile) else file.read


def _scan(
    files: Sequence[File],
    part: _Part,
    note: Callable[[], None] = lambda: None,
    hop: int = 0,
) -> _Found:
    """Find the images of a part; ``note`` hears of each."""
    file = files[part.file]
    read, heads = _reader(file, hop), _HEADS if isinstance(file, RemoteFile) else ()
    names: list[str] = []
    keys: list[str] = []
    rows = bytearray()
    texts: dict[str, str] = {}
    for member, start in members(read, part.start, part.end, file.path):
        path = safe_name(member.name)
        folder, _, name = path.rpartition("/")
        if path.startswith(".") or "/." in path:
            continue  # hidden, as in a folder
        key = f"{folder}/{name.split('.', 1)[0]}"  # what the files of a WebDataset sample share
        if name.endswith(".cls") and member.size < _LARGEST_CLASS_FILE:
            text = bytes(read(start, start + member.size)).decode("utf-8", "replace")
            texts[key] = text.strip()
        elif is_tar_name(name):
            raise DataError(_MIXED.format(path=file.path, name=member.name))
        elif is_image_name(name):
            width, height, flags = _probed(start, member.size, read, heads)
            rows += _PACKED.pack(start, member.size, -1, part.file, width, height, flags)
            names.append(f"{part.group}/{name}" if part.group else path)
            keys.append(key)
            note()
    return _Found(bytes(rows), names, [texts.get(key, "") for key in keys])


def _probed(
    start: int, size: int, read: Callable[[int, int], Bytes], heads: Sequence[int]
) -> tuple[int, int, int]:
    """Return width, height and flags of an image; ``heads`` of it are tried before all of it."""
    flags = 0
    for length in (*(head for head in heads if head < size), size):
        data = read(start, start + length)
        try:
            if data[:2] == GZIP_MAGIC:
                flags = int(Flags.GZIP)
                data = gunzip(data, _HEADER_BYTES)
            head = probe(data)
        except (ValueError, DataError):
            continue
        return min(head.width, 0xFFFF), min(head.height, 0xFFFF), flags | head.flags
    return 0, 0, flags | int(Flags.BAD)


def _arrange(rows: NDArray[np.void], names: list[str], texts: list[str], source: str) -> Index:
    """Give every image its class, and put the images in the order that a folder of them has.

    Args:
        rows: (images,) of type ROW, without labels.
        names: (images,) path of each image within its tar.
        texts: (images,) content of the .cls file beside each image; "" without one.
        source: the tars, for messages.

    Returns:
        An index of the rows, ``names``, ``classes``, and ``split``: whether folders train/ and val/
        tell the splits, in which case ``Flags.HELD_OUT`` marks the second.

    Raises:
        DataError: there are no images, or some have a class and others have none.
    """
    if not names:
        raise DataError(f"{source} holds no images")
    paths = [name.split("/") for name in names]
    shared = _shared_parents(paths)
    tops = {parts[shared] for parts in paths if len(parts) > shared + 1}
    split = "train" in tops and len(tops) > 1
    if split:  # as in a folder: train/ and val/ (or test/), and nothing else
        held_out = "val" if "val" in tops else "test"
        own = np.array([parts[shared] if len(parts) > shared + 1 else "" for parts in paths])
        kept = np.flatnonzero((own == "train") | (own == held_out))
        paths, texts, rows = [paths[i] for i in kept], [texts[i] for i in kept], rows[kept]
        rows["flags"][own[kept] == held_out] |= int(Flags.HELD_OUT)
        shared += 1
    if of_webdataset := any(texts):
        if not all(texts):
            bare = "/".join(paths[texts.index("")])
            raise DataError(f"{source}: {bare} has no .cls file beside it, though others have one")
    else:
        texts = _classes_of_folders(paths, shared, source)
    labels: NDArray[np.int64] | list[str | None] = [text or None for text in texts]
    if of_webdataset and all(text.isascii() and text.isdigit() for text in texts):
        labels = np.array([int(text[:18]) for text in texts])  # as shards of ImageNet have them
    rows["label"], classes = number_classes(labels, source)
    names = ["/".join(parts[shared:]) for parts in paths]
    order = sorted(range(len(names)), key=[_files_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(rows["label"][order], kind="stable")]
    return Index(
        {
            "rows": rows[order],
            "names": pack_texts([names[i] for i in order]),
            "classes": pack_texts(classes),
            "split": np.array(split),
        }
    )


def _shared_parents(paths: list[list[str]]) -> int:
    """Count the leading folders that all images share, the last level of folders left out."""
    first = paths[0][:-1]
    deepest = 0
    for parts in paths:
        folders = parts[:-1]
        deepest = max(deepest, len(folders))
        while folders[: len(first)] != first:
            first.pop()
    return max(0, min(len(first), deepest - 1))


def _classes_of_folders(paths: list[list[str]], shared: int, source: str) -> list[str]:
    """Return each image's class: the first folder below the shared ones; "" if none has one."""
    own = [parts[shared] if len(parts) > shared + 1 else "" for parts in paths]
    if any(own) and not all(own):
        raise DataError(
            f"{source} holds images both by themselves ({paths[own.index('')][-1]}) and in "
            f"folders ({min(filter(None, own))}/)"
        )
    return own


def _files_first(name: str) -> str:
    """Return a key that sorts as a folder is listed: its files, and then what lies deeper."""
    folder, _, own = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + own
