"""Images in tar files, read in place through an index that is built once.

Takes plain tars, WebDataset shards and tars of tars (ImageNet's official archive). Several
processes build the index. Tars on another machine are read once from beginning to end, several at
a time: a walk from header to header would wait for an answer at every step.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.console import tally
from fastsiam.errors import DataError

from ..processes import AbandonedError, forked
from ..remote import RemoteFile
from ..remote.file import Onward
from ..remote.path import Place
from .base import is_image_name
from .files import File, open_file
from .index import ROW, Index, are_small, file_facts, open_index, pack_texts, unpack_texts
from .labels import number_classes
from .placed import PlacedStore
from .probe import Bytes, Flags, probe
from .tar import is_tar_name, members, safe_name

_WNID = re.compile(r"n\d{8}")
_PACKED = struct.Struct("<QIiHHHH")
"""A row of the index, of type ROW."""
_LARGEST_CLASS_FILE = 1024
_REMOTE_TARS = 8
"""Tars on another machine that are read at a time."""


class ArchiveStore(PlacedStore):
    """Images of one or more tar files, in place.

    The label is, in this order: the WebDataset sibling ``key.cls``; the inner tar's name in a tar
    of tars; the folder within the tar (a common parent of all is left out); the tar's own name if
    it is a WordNet id. Otherwise -1. Images are sorted by class and name, as those of a folder are.

    Args:
        paths: the tar files.

    Raises:
        DataError: a tar cannot be read, is damaged or compressed, holds two splits, or there is no
            image.
    """

    kind = "tar, read in place"
    columns = (*PlacedStore.columns, "flags", "width", "height")

    def __init__(self, paths: Sequence[Place]) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].parent
        source = str(self.root) if len(paths) == 1 else f"{len(paths)} tars in {self.root}"
        files = [open_file(path) for path in paths]
        index = open_index(files, source, lambda: build_index(files, source))
        if index["split"]:
            raise _two_splits(source)
        self.classes, self._packed = tuple(unpack_texts(index["classes"])), index["names"]
        self._rows = rows = index["rows"]
        self.labels = rows["label"].astype(np.int64)
        self.flags, self.width, self.height = rows["flags"], rows["width"], rows["height"]
        self._set_places(files, rows["file"], rows["offset"], rows["size"])

    def name(self, index: int) -> str:
        """Return an image's path within the tar, without parents that all share."""
        return self._names[self.position(index)]

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

    @cached_property
    def _names(self) -> list[str]:
        return unpack_texts(self._packed)


class _Part(NamedTuple):
    """A tar, or a tar within a tar: what one process walks at a time."""

    file: int
    """Number of the file."""
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

    Returns:
        See ``_arrange``.

    Raises:
        DataError: a tar is damaged or compressed, or what they hold is no data set.
    """
    parts: list[_Part] = []
    found: dict[int, _Found] = {}
    stopped = threading.Event()

    def reader(file: File) -> Callable[[int, int], Bytes]:
        if not isinstance(file, RemoteFile):
            return file.read
        onward = Onward(file)

        def read(start: int, stop: int) -> Bytes:
            if stopped.is_set():
                raise AbandonedError
            return onward.read(start, stop)

        return read

    def find(number: int) -> list[_Part]:
        return _parts(number, files[number], reader(files[number]))

    def scan(number: int) -> tuple[int, _Found]:
        file = files[parts[number].file]
        return number, _scan(file, parts[number], reader(file))

    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(_REMOTE_TARS))
        stack.callback(stopped.set)
        in_place = threads.map if isinstance(files[0], RemoteFile) else map
        parts += [part for own in in_place(find, range(len(files))) for part in own]
        done = stack.enter_context(tally(f"indexing {source}, tars", len(parts)))
        results: Iterable[tuple[int, _Found]]
        if isinstance(files[0], RemoteFile) or are_small(files):
            results = in_place(scan, range(len(parts)))
        else:
            results = stack.enter_context(forked(-1, scan))(range(len(parts)))
        for number, own in results:
            found[number] = own
            done.add()
    ordered = [found[number] for number in range(len(parts))]
    rows = np.frombuffer(bytearray().join(part.rows for part in ordered), ROW)
    names = [name for part in ordered for name in part.names]
    return _arrange(rows, names, [text for part in ordered for text in part.texts], source)


def _parts(number: int, file: File, read: Callable[[int, int], Bytes]) -> list[_Part]:
    """Find the tars within a tar; a tar that holds none is a part itself."""
    if bytes(file.read(0, 2)) == b"\x1f\x8b":  # gzip's mark
        raise DataError(
            f"{file.path} is compressed, and so cannot be read in place: "
            "gunzip it and name the .tar"
        )
    inner = []
    for member, start in members(read, 0, len(file), file.path):
        if is_tar_name(member.name):
            group = PurePosixPath(member.name).stem
            inner.append(_Part(number, start, start + member.size, group))
        elif is_image_name(PurePosixPath(member.name).name):
            break  # a tar of images, which ``_scan`` walks
    stem = file.path.stem
    return inner or [_Part(number, 0, len(file), stem if _WNID.fullmatch(stem) else "")]


def _scan(file: File, part: _Part, read: Callable[[int, int], Bytes]) -> _Found:
    """Find the images of a part."""
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
        elif is_image_name(name):
            try:
                head = probe(read(start, start + member.size))
                size = min(head.width, 0xFFFF), min(head.height, 0xFFFF), head.flags
            except ValueError:
                size = 0, 0, int(Flags.BAD)
            rows += _PACKED.pack(start, member.size, -1, part.file, *size)
            names.append(f"{part.group}/{name}" if part.group else path)
            keys.append(key)
    return _Found(bytes(rows), names, [texts.get(key, "") for key in keys])


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
        DataError: there are no images, or a number is no class.
    """
    if not names:
        raise DataError(f"{source} holds no images")
    paths = [name.split("/") for name in names]
    shared = _shared_parents(paths)
    tops = {parts[shared] for parts in paths if len(parts) > shared + 1}
    if "train" in tops and len(tops) > 1:
        raise _two_splits(source)
    of_webdataset = any(texts)
    if not of_webdataset:  # the first folder below the shared ones
        texts = [parts[shared] if len(parts) > shared + 1 else "" for parts in paths]
    labels: NDArray[np.int64] | list[str | None] = [text or None for text in texts]
    if of_webdataset and all(text.isascii() and text.isdigit() for text in {*texts} - {""}):
        labels = np.array([int(text[:18] or -1) for text in texts])  # as ImageNet's shards have
    rows["label"], classes = number_classes(labels, source)
    names = ["/".join(parts[shared:]) for parts in paths]
    order = sorted(range(len(names)), key=[_files_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(rows["label"][order], kind="stable")]
    return {
        "rows": rows[order],
        "names": pack_texts([names[i] for i in order]),
        "classes": pack_texts(classes),
        "split": np.array(False),  # version 0.2 read both splits of a tar
    }


def _two_splits(source: str) -> DataError:
    return DataError(
        f"{source} holds folders train/ and others: unpack it, or make a tar of each split, "
        "train.tar and val.tar"
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


def _files_first(name: str) -> str:
    """Return a key that sorts as a folder is listed: its files, and then what lies deeper."""
    folder, _, own = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + own
