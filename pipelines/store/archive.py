"""Images in tar files, read in place through an index that is built once.

Takes plain tars, WebDataset shards and tars of tars (ImageNet's official archive).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError

from ..remote.path import Place
from .archive_index import build
from .base import Split
from .files import open_file
from .index import file_facts, open_index, unpack_texts
from .placed import PlacedStore
from .probe import Bytes, Flags
from .tar import gunzip

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
        index = open_index(files, source, lambda _: build(files, source)).arrays
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
