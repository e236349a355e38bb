"""Images in tar files, read in place through an index that is built once.

Takes plain tars, WebDataset shards and tars of tars (ImageNet's official archive).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError

from ..remote.path import Place
from .archive_build import ALONE_BYTES, build
from .archive_index import Index, file_facts, homes, keep, load
from .base import NewChunk, Split, Store
from .blocks import blocks
from .files import File, allocator, located, open_file, read_ahead, read_into
from .probe import Bytes, Flags
from .tar import gunzip

log = logging.getLogger(__name__)

_LARGEST_UNZIPPED = 2**28


class ArchiveStore(Store):
    """Images of one or more tar files, in place.

    The label is, in this order: the WebDataset sibling ``key.cls``; the inner tar's name in a tar
    of tars; the folder within the tar (a common parent of all is left out, and ``train/`` and
    ``val/`` are taken for splits); the tar's own name if it is a WordNet id. Otherwise -1. Images
    are sorted by class and name, as those of a folder are.

    Args:
        paths: the tar files.
        split: which images, if the tars hold folders train/ and val/.
        of_split: if the tars hold no such folders, take all images; else there are none.

    Raises:
        NoSplitError: the tars hold no images of that split.
        DataError: a tar cannot be read, is damaged or compressed, or there is no image.
    """

    kind = "tar, read in place"

    def __init__(
        self, paths: Sequence[Place], split: Split = "train", of_split: bool = True
    ) -> None:
        self.root = paths[0] if len(paths) == 1 else paths[0].parent
        source = str(self.root) if len(paths) == 1 else f"{len(paths)} tars in {self.root}"
        self._files = [open_file(path) for path in paths]
        index = _indexed(self._files, source)
        self.classes, self._packed = index.classes, index.names
        self._own = np.arange(len(index.rows))
        if index.split:
            held_out = (index.rows["flags"] & Flags.HELD_OUT) > 0
            self._own = np.flatnonzero(held_out == (split == "val"))
        self.rows = index.rows[self._own]
        """(images,) of type ROW."""
        if not len(self.rows) or not (index.split or of_split):
            raise NoSplitError(f"{source} holds no {split} images")
        self.labels = self.rows["label"].astype(np.int64)

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes: a view into the mapped tar, or unpacked if gzipped."""
        row = self.rows[index]
        start, size = int(row["offset"]), int(row["size"])
        data = self._files[int(row["file"])].read(start, start + size)
        if row["flags"] & Flags.GZIP:
            try:
                unpacked = gunzip(data, _LARGEST_UNZIPPED + 1)
            except DataError as error:
                raise self.cannot_decode(index, error) from error
            if len(unpacked) > _LARGEST_UNZIPPED:
                raise self.cannot_decode(index, "unpacked it is above 256 MiB")
            return unpacked
        return data

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the bytes of several images; those of remote tars in memory from ``new_chunk``."""
        if not self.is_remote:
            return super().read_into(indices, new_chunk)
        data: list[Bytes] = []
        allocate = allocator(new_chunk)
        for index, row in zip(indices.tolist(), self.rows[indices], strict=True):
            if row["flags"] & Flags.GZIP:
                data.append(self.read(index))
                continue
            start, size = int(row["offset"]), int(row["size"])
            file = self._files[int(row["file"])]
            data.append(read_into(file, start, start + size, allocate))
        return data

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in the mapped tars; None if some are gzipped."""
        rows = self.rows[indices]
        if (rows["flags"] & Flags.GZIP).any():
            return None
        return located(self._files, rows["file"], rows["offset"], rows["size"])

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        rows = self.rows[np.asarray(indices, np.int64)]
        read_ahead(self._files, rows["file"], rows["offset"], rows["size"])

    def mapped(self) -> Sequence[File]:
        """Return the tars."""
        return self._files

    def name(self, index: int) -> str:
        """Return an image's path within the tar, without parents that all share."""
        return self._names[int(self._own[index])]

    def where(self, index: int) -> str:
        """Return an image's tar, place and name, for messages."""
        row = self.rows[index]
        path = self._files[row["file"]].path
        return f"{self.name(index)} (in {path}, {row['size']:,} bytes at {row['offset']:,})"

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each image: (images, 2); None if some are to be turned."""
        if self.rules.exif == "apply" and (self.rows["flags"] & Flags.ROTATED).any():
            return None  # the index does not say by how much
        return np.stack([self.rows["height"], self.rows["width"]], axis=1).astype(np.int64)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image as stored: (images,)."""
        return self.rows["size"].astype(np.int64)

    def blocks(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks that images lie in: parts of the tars."""
        return blocks(self.rows["file"], self.rows["offset"])

    def stamp(self) -> str:
        """Return a text that changes with the tars and with what was found in them."""
        text = json.dumps(file_facts(self._files))
        return hashlib.sha256(text.encode() + self.rows.tobytes()).hexdigest()

    @cached_property
    def _names(self) -> list[str]:
        return str(zlib.decompress(self._packed), "utf-8", "surrogateescape").split("\0")


def _indexed(files: Sequence[File], source: str) -> Index:
    """Load the index from beside the tars or from the user's cache; else build and keep it."""
    facts, places = file_facts(files), homes(files)
    for place in places:
        if (index := load(place, facts)) is not None:
            return index
    began, size = time.monotonic(), sum(map(len, files))
    if size >= ALONE_BYTES:
        log.info(f"indexing {source} ({size / 1e9:,.1f} GB), which is done once")
    index = build(files, source)
    kept = keep(index, places, facts)
    odd = _odd(index.rows["flags"])
    log.info(
        f"indexed {len(index.rows):,} images of {len(index.classes):,} classes in {source} "
        f"in {time.monotonic() - began:.1f} s ({f'kept in {kept}' if kept else 'not kept'})"
        + (f"; odd ones: {odd}" if odd else "")
    )
    return index


def _odd(flags: NDArray[np.uint16]) -> str:
    """Count the images with each flag, in words."""
    counts = {f.name: int(np.count_nonzero(flags & f)) for f in Flags if f != Flags.HELD_OUT}
    words = ((name or "").lower().replace("_", " ") for name in counts)
    return ", ".join(f"{n:,} {word}" for word, n in zip(words, counts.values(), strict=True) if n)
