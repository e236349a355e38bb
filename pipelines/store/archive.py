"""Images in tar files, read in place through an index that is built once.

Takes plain tars, WebDataset shards and tars of tars (ImageNet's official archive). One row of the
index is 24 bytes: 1.28 million images in 30 MB.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import logging
import os
import re
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError

from ..processes import forked
from .base import Bytes, Mapped, Split, Store, is_image_name, numbered_classes
from .probe import GZIP_MAGIC, Flags, probe

log = logging.getLogger(__name__)

ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("label", "<i4"),
        ("file", "<u2"),
        ("width", "<u2"),
        ("height", "<u2"),
        ("flags", "<u2"),
    ]
)
"""An image of the index: where its bytes are, its class, its size in pixels, ``Flags``."""

_FORMAT = 2
_WNID = re.compile(r"n\d{8}")
_LARGEST_UNZIPPED = 2**28
_MIXED = "{path} holds both images and tars ({name}): unpack it, or make two of it"
_LARGEST_READ = 2**20
"""No header is longer, whatever it says of itself."""
_MOST_FILES = 0xFFFF
_CHUNK = 4096
_ALONE_BYTES = 2**28
"""Less is indexed in this process."""
_SAY_SECONDS = 10.0
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class Index:
    """What lies where in a set of tar files."""

    rows: NDArray[np.void]
    """(images,) of type ROW, sorted by class and name."""
    classes: tuple[str, ...]
    split: bool
    """Whether folders train/ and val/ tell the splits; ``Flags.HELD_OUT`` marks the second."""
    names: bytes
    """The images' names, joined by zeros and compressed: they are seldom wanted."""


class ArchiveStore(Store):
    """Images of one or more tar files, in place.

    The label is, in this order: the WebDataset sibling ``key.cls``; the inner tar's name in a tar
    of tars; the folder within the tar (a common parent of all is left out, and ``train/`` and
    ``val/`` are taken for splits); the tar's own name if it is a WordNet id. Otherwise -1. Images
    are sorted by class and name, as those of a folder are.

    Args:
        paths: the tar files.
        split: which images, if the tars hold folders train/ and val/.
        of_split: all images are of that split, if the tars hold no such folders.

    Raises:
        NoSplitError: the tars hold no images of that split.
        DataError: a tar cannot be read, is damaged or compressed, or there is no image.
    """

    kind = "tar, read in place"

    def __init__(self, paths: list[Path], split: Split = "train", of_split: bool = True) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].parent
        self._files = [Mapped(path) for path in paths]
        index = _cached_index(paths, self._files)
        self.classes, self._packed = index.classes, index.names
        self._own = np.arange(len(index.rows))
        if index.split:
            held_out = (index.rows["flags"] & Flags.HELD_OUT) > 0
            self._own = np.flatnonzero(held_out == (split == "val"))
        self.rows = index.rows[self._own]
        """(images,) of type ROW."""
        if not len(self.rows) or not (index.split or of_split):
            raise NoSplitError(f"{_short(paths)} holds no {split} images")
        self.labels = self.rows["label"].astype(np.int64)

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes: a view into the mapped tar, unless they are gzipped."""
        data = self._stored(index)
        if self.rows["flags"][index] & Flags.GZIP:
            unpacked = _gunzip(data, _LARGEST_UNZIPPED + 1)
            if len(unpacked) > _LARGEST_UNZIPPED:
                raise DataError(f"cannot read {self.where(index)}: unpacked it is above 256 MiB")
            return unpacked
        return data

    def name(self, index: int) -> str:
        """Return an image's path within the tar, without parents that all share."""
        return self._names[int(self._own[index])]

    def where(self, index: int) -> str:
        """Return an image's tar, place and name, for messages."""
        row = self.rows[index]
        path = self._files[row["file"]].path
        return f"{self.name(index)} (in {path}, {row['size']:,} bytes at {row['offset']:,})"

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image as stored: (images,)."""
        return self.rows["size"].astype(np.int64)

    def stamp(self) -> str:
        """Return a text that changes with the tars and with what was found in them."""
        text = json.dumps(_file_facts([file.path for file in self._files]))
        return hashlib.sha256(text.encode() + self.rows.tobytes()).hexdigest()

    @cached_property
    def _names(self) -> list[str]:
        return str(zlib.decompress(self._packed), "utf-8", "surrogateescape").split("\0")

    def _stored(self, index: int) -> memoryview:
        row = self.rows[index]
        start, size = int(row["offset"]), int(row["size"])
        file = self._files[int(row["file"])]
        return file.view[start : start + size]


def _cached_index(paths: list[Path], files: list[Mapped]) -> Index:
    """Load the index beside the tars, or in the user's cache; else build it and leave it there."""
    facts = _file_facts(paths)
    names = [fact[0] for fact in facts]
    key = hashlib.sha256(json.dumps([str(paths[0].parent.resolve()), names]).encode()).hexdigest()
    stem = paths[0].stem if len(paths) == 1 else f"{paths[0].stem}-and-{len(paths) - 1}-more"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "fastsiam"
    homes = [
        paths[0].parent / f".{stem}.fastsiam-index",
        cache / f"{key[:16]}.index",
    ]
    for home in homes:
        if (index := _load(home, facts)) is not None:
            return index
    began, size = time.monotonic(), sum(len(file) for file in files)
    if size >= _ALONE_BYTES:
        log.info(f"indexing {_short(paths)} ({size / 1e9:,.1f} GB), which is done once")
    index = _build(paths, files)
    kept = _keep(index, homes, facts)
    odd = _odd(index.rows["flags"])
    log.info(
        f"indexed {len(index.rows):,} images of {len(index.classes):,} classes in {_short(paths)} "
        f"in {time.monotonic() - began:.1f} s ({'kept in ' + str(kept) if kept else 'not kept'})"
        + (f"; odd ones: {odd}" if odd else "")
    )
    return index


def _file_facts(paths: list[Path]) -> list[list[str | int]]:
    facts: list[list[str | int]] = []
    for path in paths:
        found = path.stat()
        facts.append([path.name, found.st_size, found.st_mtime_ns])
    return facts


def _load(home: Path, facts: list[list[str | int]]) -> Index | None:
    """Read a kept index, if it is whole and of these files."""
    try:
        head, _, body = home.read_bytes().partition(b"\n")
        known = json.loads(head)
        if known["format"] != _FORMAT or known["files"] != facts:
            return None
        if known["crc32"] != zlib.crc32(body):
            return None
        size = int(known["images"]) * ROW.itemsize
        rows = np.frombuffer(body[:size], ROW)
        return Index(rows, tuple(known["classes"]), bool(known["split"]), body[size:])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(index: Index, homes: list[Path], facts: list[list[str | int]]) -> Path | None:
    """Write the index to the first place that takes it."""
    body = index.rows.tobytes() + index.names
    head = {
        "format": _FORMAT,
        "files": facts,
        "classes": index.classes,
        "split": index.split,
        "images": len(index.rows),
        "crc32": zlib.crc32(body),
    }
    for home in homes:
        temporary = home.with_name(f"{home.name}.{os.getpid()}.tmp")
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(json.dumps(head).encode() + b"\n" + body)
            os.replace(temporary, home)
            return home
        except OSError:  # a read-only place, or a full one
            with contextlib.suppress(OSError):
                temporary.unlink()
    return None


def _odd(flags: NDArray[np.uint16]) -> str:
    """Count the images with each flag, in words."""
    counts = {f.name: int(np.count_nonzero(flags & f)) for f in Flags if f != Flags.HELD_OUT}
    words = ((name or "").lower().replace("_", " ") for name in counts)
    return ", ".join(f"{n:,} {word}" for word, n in zip(words, counts.values(), strict=True) if n)


def _short(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} tars in {paths[0].parent}"


# --- building -------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A tar, or a tar within a tar."""

    file: int
    start: int
    end: int
    group: str
    """Name that the place gives its images: the inner tar's, or ""."""


class _Found(NamedTuple):
    """What one part holds."""

    names: list[str]
    rows: NDArray[np.void]
    """(images,) of type ROW, without labels."""
    classes: dict[str, str]
    """Content of WebDataset's .cls files, by file and key."""


def _build(paths: list[Path], files: list[Mapped]) -> Index:
    if len(files) > _MOST_FILES:
        raise DataError(
            f"{len(files):,} tars are more than the {_MOST_FILES:,} that can be indexed"
        )
    parts = [part for number in range(len(files)) for part in _parts(paths, files, number)]
    size = sum(len(file) for file in files)
    found: dict[int, _Found] = {}
    if size < _ALONE_BYTES or len(parts) == 1:
        _share(paths, files, parts)
        found = dict(map(_scan_shared, range(len(parts))))
    else:
        said = time.monotonic()
        with forked(-1, _share, paths, files, parts) as run:
            for number, part in run(_scan_shared, range(len(parts))):
                found[number] = part
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    log.info(f"indexing {_short(paths)}: {len(found):,} of {len(parts):,} parts")
    ordered = [found[number] for number in range(len(parts))]
    names = [name for part in ordered for name in part.names]
    texts = {key: text for part in ordered for key, text in part.classes.items()}
    return _sorted(names, np.concatenate([part.rows for part in ordered]), texts, _short(paths))


_shared: tuple[list[Path], list[Mapped], list[_Part]]


def _share(paths: list[Path], files: list[Mapped], parts: list[_Part]) -> None:
    global _shared
    _shared = paths, files, parts


def _scan_shared(number: int) -> tuple[int, _Found]:
    paths, files, parts = _shared
    return number, _scan(paths, files, parts[number])


def _parts(paths: list[Path], files: list[Mapped], number: int) -> Iterator[_Part]:
    """Find the tars within a tar; a tar without any is a part itself."""
    path, view = paths[number], files[number].view
    if view[:2] == GZIP_MAGIC:
        raise DataError(
            f"{path} is compressed, and so cannot be read in place: gunzip it and name the .tar"
        )
    inner = []
    for member, start in _members(view, 0, len(view), path):
        if _is_tar(member.name):
            group = PurePosixPath(member.name).stem
            inner.append(_Part(number, start, start + member.size, group))
        elif is_image_name(PurePosixPath(member.name).name):
            if inner:
                raise DataError(_MIXED.format(path=path, name=member.name))
            break  # a tar of images; the workers walk it
    if not inner:
        inner = [_Part(number, 0, len(view), path.stem if _WNID.fullmatch(path.stem) else "")]
    yield from inner


def _scan(paths: list[Path], files: list[Mapped], part: _Part) -> _Found:
    """List the images of one part, and its WebDataset class files."""
    view = files[part.file].view
    names: list[str] = []
    rows: list[NDArray[np.void]] = []
    classes: dict[str, str] = {}
    for member, start in _members(view, part.start, part.end, paths[part.file]):
        path = _safe(member.name)
        name = path.rpartition("/")[2]
        if path.startswith(".") or "/." in path:
            continue  # hidden, as in a folder
        if name.endswith(".cls") and member.size < 1024:
            text = bytes(view[start : start + member.size]).decode("utf-8", "replace")
            classes[_key(part.file, path)] = text.strip()
        elif _is_tar(name):
            raise DataError(_MIXED.format(path=paths[part.file], name=member.name))
        elif is_image_name(name):
            if len(names) % _CHUNK == 0:
                rows.append(np.zeros(_CHUNK, ROW))
            rows[-1][len(names) % _CHUNK] = _probed(part.file, start, member.size, view)
            names.append(f"{part.group}/{name}" if part.group else path)
    return _Found(names, np.concatenate([*rows, np.zeros(0, ROW)])[: len(names)], classes)


def _members(
    view: memoryview, start: int, end: int, path: Path
) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Walk a tar within ``view[start:end]``: its regular files and where their data begin."""
    try:
        with tarfile.open(fileobj=_Window(view[start:end]), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or a million of them stay
                at = start + member.offset_data
                if member.islnk() and is_image_name(PurePosixPath(member.name).name):
                    raise tarfile.ReadError(
                        f"{member.name} is a link to {member.linkname}; "
                        "make the tar anew with tar --hard-dereference"
                    )
                if not member.isreg():
                    continue
                if member.sparse is not None:
                    raise tarfile.ReadError(f"{member.name} is stored sparsely")
                if not 0 <= member.size < 2**32 or at + member.size > end:
                    raise tarfile.ReadError("unexpected end of data")
                yield member, at
            # The module takes a damaged header for the end; a whole tar ends with a block of zeros.
            last = view[start + tar.offset : min(start + tar.offset + _BLOCK, end)]
            if len(last) < _BLOCK or any(last):
                raise tarfile.ReadError(f"damaged or cut after {start + tar.offset:,} bytes")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} is no whole tar file ({error}); fetch it again, or check it with tar -tf"
        ) from error


class _Window(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        size = _LARGEST_READ if size is None or size < 0 else min(size, _LARGEST_READ)
        end = self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def _probed(file: int, start: int, size: int, view: memoryview) -> tuple[int, ...]:
    """Return the row of an image, without its label."""
    data: Bytes = view[start : start + size]
    flags = 0
    try:
        if data[:2] == GZIP_MAGIC:
            flags |= int(Flags.GZIP)
            data = _gunzip(data, 2**20)
        found = probe(data)
    except (ValueError, DataError):
        return start, size, -1, file, 0, 0, flags | int(Flags.BAD)
    width, height = min(found.width, 0xFFFF), min(found.height, 0xFFFF)
    return start, size, -1, file, width, height, flags | found.flags


def _gunzip(data: Bytes, limit: int) -> bytes:
    """Decompress up to ``limit`` bytes."""
    try:
        with gzip.open(io.BytesIO(data)) as file:
            return file.read(limit)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"a gzipped image in a tar is damaged: {error}") from error


def _is_tar(name: str) -> bool:
    return name.endswith(".tar") and not PurePosixPath(name).name.startswith(".")


def _safe(name: str) -> str:
    """Drop from a member's name what could lead anywhere; it serves for labels and messages."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


def _key(file: int, name: str) -> str:
    """Return a WebDataset key: the tar, and the path up to the first dot of the file's name."""
    folder, _, own = name.rpartition("/")
    return f"{file}/{folder}/{own.split('.', 1)[0]}"


def _sorted(names: list[str], rows: NDArray[np.void], texts: dict[str, str], source: str) -> Index:
    """Give every image its class, and put the images in the order that a folder of them has."""
    if not names:
        raise DataError(f"{source} holds no images")
    paths = list(map(_split, names))
    shared = _shared_parents(names)
    tops = {parts[shared] for parts in paths if len(parts) > shared + 1}
    split = "train" in tops and len(tops) > 1
    if split:  # as in a folder: train/ and val/ (or test/), and nothing else
        other = "val" if "val" in tops else "test"
        kept = [
            i for i, p in enumerate(paths) if len(p) > shared + 1 and p[shared] in ("train", other)
        ]
        rows = rows[kept]
        names, paths = [names[i] for i in kept], [paths[i] for i in kept]
        held_out = np.array([parts[shared] == other for parts in paths])
        rows["flags"] |= np.where(held_out, int(Flags.HELD_OUT), 0).astype(np.uint16)
        shared += 1
    if texts:
        own = [texts.get(_key(int(f), n), "") for n, f in zip(names, rows["file"], strict=True)]
        if not all(own):
            bare = names[own.index("")]
            raise DataError(f"{source}: {bare} has no .cls file beside it, though others have one")
    else:
        own = [parts[shared] if len(parts) > shared + 1 else "" for parts in paths]
        if any(own) and not all(own):
            raise DataError(
                f"{source} holds images both by themselves ({paths[own.index('')][-1]}) and in "
                f"folders ({min(filter(None, own))}/)"
            )
    numbered = texts and all(name.isascii() and name.isdigit() for name in own)
    if numbered:  # as shards of ImageNet have it: the labels themselves
        labels = np.array([int(name[:18]) for name in own], np.int64)
        classes = numbered_classes(labels, source)
    else:
        classes = tuple(sorted(set(own) - {""}))
        place = {name: label for label, name in enumerate(classes)}
        labels = np.array([place.get(name, -1) for name in own], np.int64)
    rows["label"] = labels
    names = ["/".join(parts[shared:]) for parts in paths]
    order = sorted(range(len(names)), key=[_file_first(name) for name in names].__getitem__)
    order = [order[i] for i in np.argsort(labels[order], kind="stable")]
    joined = "\0".join(names[i].replace("\0", "_") for i in order)
    packed = zlib.compress(joined.encode("utf-8", "surrogateescape"), 1)
    return Index(rows[order], classes, split, packed)


def _split(name: str) -> list[str]:
    return name.split("/")


def _file_first(name: str) -> str:
    """Return a key that sorts as a folder is listed: its files, and then what lies deeper."""
    folder, _, own = name.rpartition("/")
    return "\1" + folder.replace("/", "\1") + "\0" + own


def _shared_parents(names: list[str]) -> int:
    """Count the leading folders that all images share, the last level of folders left out."""
    first = _split(names[0])[:-1]
    deepest = 0
    for name in names:
        folders = _split(name)[:-1]
        deepest = max(deepest, len(folders))
        while folders[: len(first)] != first:
            first.pop()
    return max(0, min(len(first), deepest - 1))
