"""The data set interface: random access to each image's bytes, label and name by position."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.errors import DataError, ImageError
from fastsiam.files import quote
from fastsiam.trace import span

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .decode import ImageRules, decode
from .mapped_files import File, Mapped
from .probe import Bytes, Probe, probe

log = logging.getLogger(__name__)

NewChunk = Callable[[], memoryview]
"""Allocates a writable buffer for several images."""

JPEG_ENDINGS = (".jpg", ".jpeg")
IMAGE_ENDINGS = (*JPEG_ENDINGS, ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")

BLOCK_IMAGES = 64
"""Maximum number of images per block of neighbouring images in a file (7 MB for ImageNet). Larger
blocks would reduce the excess bytes read at block edges (4%) only slightly. If the data set is
sorted by class, each window would also contain fewer classes."""

_FEW_FILES = 16
"""Maximum number of files that ``Store.check`` checks."""


class Store(ABC):
    """A data set whose images are accessed by position, from 0 to ``len(store) - 1``.

    Names and labels are numpy arrays and files are memory-mapped, so loader processes share them
    without copies.
    """

    columns: ClassVar[tuple[str, ...]] = ("labels", "groups", "width", "height")
    """Names of attributes with one array element per image, or None.

    ``select_images`` indexes them."""
    kind: str
    """Description of the data format, for messages."""
    repair: ClassVar[str] = "repair the image"
    """What the user can do about a bad image, for messages."""
    root: Place
    """Path or URL of the images, for messages."""
    origin: Place | None = None
    """Path or URL that the user passed; None means ``root``."""
    classes: tuple[str, ...]
    """Class names, indexed by label; empty if the images have no classes."""
    labels: NDArray[np.int64]
    """(images,) index of each image's class in ``classes``, or -1 if it has no label."""
    width: NDArray[Any] | None = None
    height: NDArray[Any] | None = None
    """(images,) size of each image in pixels; None if neither the files nor their index have it."""
    groups: NDArray[np.int64] | None = None
    """(images,) index of the unit that each image is read with: a row group of a parquet file.

    None if images are read individually. Only parquet files opened for conversion have groups.
    """
    sets: NDArray[np.int64] | None = None
    """(images,) index of each image's data set in a mixture; None if this is not a mixture."""
    positions: NDArray[np.int64] | None = None
    """(images,) position of each image in the full data set; None if this store is not a subset."""
    files: Sequence[File] = ()
    """Files that images are read from by byte range: memory-mapped, or remote."""
    rules: ImageRules = ImageRules()
    """How EXIF orientation and transparency are handled when images are decoded."""
    _whole: Store | None = None
    """The full data set, if this store is a subset."""

    def __str__(self) -> str:
        return f"{self.root} ({self.kind})"

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Bytes:
        """Return an image's bytes: an encoded file, or raw pixels if ``raw_size`` is not None.

        Raises:
            DataError: the image cannot be read; the message names it.
        """

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the bytes of images at (N,) positions, like ``read``.

        ``new_chunk`` allocates buffers for bytes that have to be copied.
        """
        return [self.read(index) for index in indices.tolist()]

    @abstractmethod
    def name(self, index: int) -> str:
        """Return an image's name within the data set, such as ``class/file.jpg``."""

    def class_name(self, index: int) -> str:
        """Return the name of an image's class, or "" if it has no class."""
        label = int(self.labels[index])
        return self.classes[label] if label >= 0 and self.classes else ""

    def where(self, index: int) -> str:
        """Return the location of an image, for messages."""
        return f"{self.root}: {self.name(index)}"

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) if the image is stored as H x W x 3 uint8 pixels, else None."""
        return None

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return the height and width of each decoded image: (images, 2); None if unknown."""
        if self.width is None or self.height is None:
            return None
        return np.stack([self.height, self.width], axis=1).astype(np.int64)

    def set_rules(self, rules: ImageRules) -> None:
        """Set the decoding rules; call this before ``select_images`` or use in other processes."""
        self.rules = rules

    def rules_of(self, index: int) -> ImageRules:
        """Return the decoding rules of an image; they may differ between data sets of a mixture."""
        return self.rules

    def header(self, index: int, data: Bytes) -> Probe:
        """Parse an image's header from ``data``, the result of ``read(index)``.

        Raises:
            DataError: the bytes are not an image; the message names the file.
        """
        raw = self.raw_size(index)
        try:
            return probe(data) if raw is None else Probe(*raw, 0)
        except ValueError as error:
            raise self.cannot_decode(index, error) from error

    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each image in bytes: (images,)."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a fingerprint of the files: their names, sizes and modification times."""

    def blocks(self) -> NDArray[np.int64]:
        """Return the number of each image's block of neighbours: (images,); see ``blocks``."""
        if self._whole is not None:
            return self._whole.blocks()[self.positions]
        return self._blocks()

    def _blocks(self) -> NDArray[np.int64]:
        """Return the blocks of the full data set, by default in the order of the positions."""
        return in_order(len(self))

    def position(self, index: int) -> int:
        """Return the position of an image in the full data set."""
        return index if self.positions is None else int(self.positions[index])

    def full_positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of N images in the full data set: (N,)."""
        return indices if self.positions is None else self.positions[indices]

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return where images at (N,) positions are in memory, if all of them are there or mapped.

        Returns:
            (N,) addresses and (N,) lengths in bytes, valid while the store exists; None if ``read``
            has to fetch or unpack images. Call ``check`` after reading from these addresses: it
            raises if a mapped file was truncated meanwhile.
        """
        return None

    def prefetch(self, indices: Sequence[int]) -> None:  # noqa: B027  # a no-op by default
        """Start to prefetch images that will be read soon, from a server or a disk."""

    @property
    def is_remote(self) -> bool:
        """Whether images are in object storage or on a web server."""
        return isinstance(self.root, RemotePath) or any(
            isinstance(file, RemoteFile) for file in self.files
        )

    def check(self) -> None:
        """Raise if a mapped file's size has changed, because bytes read from it may be wrong.

        A check takes 0.3 us per file. A store with more than 16 files is not checked.

        Raises:
            FileLostError: the size of a file has changed; the message names the file.
        """
        if len(self.files) <= _FEW_FILES:
            for file in self.files:
                file.check()

    def is_intact(self, index: int, data: Bytes) -> bool:
        """Return whether bytes match an image's checksum; True if the store has no checksums."""
        return True

    def decode(self, index: int, data: Bytes | None = None) -> Image.Image:
        """Decode an image to RGB by the store's rules; read it unless its bytes are passed.

        Raises:
            DataError: the file is missing, truncated, too large or not an image; it is named.
        """
        if data is None:
            with span("read"):
                data = self.read(index)
        try:
            with span("decode"):
                return decode(data, self.raw_size(index), self.rules_of(index))
        except ValueError as error:
            raise self.cannot_decode(index, error) from error

    def cannot_decode(self, index: int, reason: object) -> ImageError:
        """Return an ``ImageError`` for an image that cannot be decoded.

        Raises:
            FileLostError: a file's size changed, so the image itself may be intact.
        """
        for file in self.files:
            file.check()
        advice = self.repair
        if self.sets is None:  # a conversion reads one data set
            source = quote(self.origin or self.root)
            advice += (
                f", or convert the others: fastsiam convert folder --source {source} --skip-bad"
            )
        return ImageError(
            f"cannot decode {self.where(index)}: {reason}; {advice}",
            index=index,
            name=self.name(index),
            reason=str(reason),
        )


class PlacedStore(Store):
    """A store whose images are byte ranges of files; subclasses call ``_set_places``."""

    columns: ClassVar[tuple[str, ...]] = (*Store.columns, "file", "start", "size")

    def _set_places(
        self,
        files: Sequence[File],
        file: NDArray[np.integer],
        start: NDArray[np.integer],
        size: NDArray[np.integer],
    ) -> None:
        """Set the byte range of each image: number in ``files``, offset and size, each (images,).

        Raises:
            DataError: a range extends beyond its file.
        """
        self.files, self.file, self.start, self.size = files, file, start, size
        ends = np.array([len(one) for one in files])[file]
        outside = (start < 0) | (size < 0) | (start > ends - size)
        if outside.any():
            index = int(np.argmax(outside))
            path = files[int(file[index])].path
            raise DataError(
                f"{path} is damaged: image {index} lies outside the file; convert, write or fetch "
                "it again"
            )

    def read(self, index: int) -> Bytes:
        """Return an image's bytes: a view into a mapped file, or bytes fetched from a server."""
        start = int(self.start[index])
        file: File = self.files[self.file[index]]
        return file.read(start, start + int(self.size[index]))

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in mapped files, or None; see ``Store.locate``."""
        addresses = [file.address for file in self.files if isinstance(file, Mapped)]
        if len(addresses) < max(1, len(self.files)) or not self.size[indices].all():
            return None
        base = np.array(addresses, np.int64)[self.file[indices]]
        return base + self.start[indices].astype(np.int64), self.size[indices].astype(np.int64)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to prefetch images that will be read soon."""
        rows = np.asarray(indices, np.int64)
        file, start = self.file[rows], self.start[rows].astype(np.int64)
        stop = start + self.size[rows].astype(np.int64)
        for number in np.unique(file).tolist() if self.files else ():
            of_file = file == number
            ranges = zip(start[of_file].tolist(), stop[of_file].tolist(), strict=True)
            self.files[number].prefetch(list(ranges))

    def sizes(self) -> NDArray[np.int64]:
        """Return the stored size of each image in bytes: (images,)."""
        return self.size.astype(np.int64)

    def _blocks(self) -> NDArray[np.int64]:
        return blocks(self.file, self.start)


def select_images(store: Store, positions: NDArray[np.int64]) -> Store:
    """Return a view of a store, of the same type, whose image i is ``positions[i]`` of the store.

    Args:
        store: the store to select from.
        positions: (images,) positions in the store, in any order; duplicates are allowed.
    """
    if np.array_equal(positions, np.arange(len(store))):
        return store
    subset = copy(store)  # keeps files open and checked
    for name in subset.columns:
        if (column := getattr(store, name)) is not None:
            setattr(subset, name, column[positions])
    subset._whole, subset.positions = store._whole or store, store.full_positions(positions)
    return subset


@cache
def warn_once(message: str) -> None:
    """Log a warning once per process."""
    log.warning(message)


def is_image_name(name: str) -> bool:
    """Return whether a file name, without folders, has an image extension and is not hidden."""
    return name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is not part of the data. Only root can list lost+found."""
    return name.startswith(".") or name == "lost+found"


def blocks(file: NDArray[np.integer], offset: NDArray[np.integer]) -> NDArray[np.int64]:
    """Divide images into blocks of neighbours in the same file.

    Args:
        file: (images,) index of each image's file or shard.
        offset: (images,) offset of each image in its file, in any unit.

    Returns:
        (images,) block number of each image, ascending from 0 with file and offset. A block has
        ``BLOCK_IMAGES`` images of one file; a file's last block may have fewer.
    """
    order = np.lexsort((offset, file))
    _, first, images = np.unique(file[order], return_index=True, return_counts=True)
    place_in_file = np.arange(len(order)) - np.repeat(first, images)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(place_in_file % BLOCK_IMAGES == 0) - 1
    return numbers


def in_order(images: int) -> NDArray[np.int64]:
    """Divide images that are stored in the order of their positions: (images,) block numbers."""
    return np.arange(images) // BLOCK_IMAGES
