"""The interface of data sets: images by position, each with its bytes, label and name."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.errors import DataError, ImageError, NoSplitError
from fastsiam.files import quoted
from fastsiam.trace import span

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .decode import ImageRules, decode
from .files import File, Mapped
from .probe import Bytes, Probe, probe

log = logging.getLogger(__name__)

Split = Literal["train", "val"]
NewChunk = Callable[[], memoryview]
"""Returns writable memory for several images."""

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
}
"""Names of folders and files for each split; the first that exists is taken."""

JPEG_ENDINGS = (".jpg", ".jpeg")
IMAGE_ENDINGS = (*JPEG_ENDINGS, ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")

BLOCK_IMAGES = 64
"""Most images of a block, which lie side by side in a file: 7 MB of ImageNet's. Larger blocks would
save little more of what is read at their edges, 4%, and a window of a data set that is sorted by
class would show fewer classes."""

_FEW_FILES = 16


class Store(ABC):
    """A data set: images that are asked for by position, from 0 to ``len(store) - 1``.

    Names and labels live in numpy arrays and files are mapped, so that loader processes share them
    without copying.
    """

    columns: ClassVar[tuple[str, ...]] = ("labels", "groups")
    """Attributes that are arrays with one element for each image, or None."""
    kind: str
    """Kind of source, for messages."""
    repair: ClassVar[str] = "repair the image"
    """What the user can do about a bad image."""
    root: Place
    """Path or address of the images, for messages."""
    origin: Place | None = None
    """Path or address that the user gave; None if it is ``root``."""
    classes: tuple[str, ...]
    """Class names, in the order of their labels; empty if the images have none."""
    labels: NDArray[np.int64]
    """(images,) position of each image's class among ``classes``, or -1."""
    groups: NDArray[np.int64] | None = None
    """(images,) number of the piece that holds each image, such as a row group of a parquet file.

    None where every image is read by itself, as in all stores but those that a conversion opens.
    """
    sets: NDArray[np.int64] | None = None
    """(images,) number of the data set that each image is of; None if this is no mixture."""
    positions: NDArray[np.int64] | None = None
    """(images,) position of each image in the whole data set; None if this is all of it."""
    files: Sequence[File] = ()
    """Files that images are read from by ranges: mapped, or on another machine."""
    rules: ImageRules = ImageRules()
    """How files become RGB where their format leaves a choice."""
    _whole: Store | None = None
    """The whole data set, if this is not all of it."""

    def __str__(self) -> str:
        return f"{self.root} ({self.kind})"

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Bytes:
        """Return an image's bytes: an encoded file, or pixels if ``raw_size`` says so.

        Raises:
            DataError: they cannot be read; names the image.
        """

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the bytes of several images, as ``read`` does.

        Args:
            indices: (N,) positions.
            new_chunk: allocates memory for the bytes that have to be copied.
        """
        return [self.read(index) for index in indices.tolist()]

    @abstractmethod
    def name(self, index: int) -> str:
        """Return an image's name within the data set, such as ``class/file.jpg``."""

    def class_name(self, index: int) -> str:
        """Return the name of an image's class, "" if it has none."""
        label = int(self.labels[index])
        return self.classes[label] if label >= 0 and self.classes else ""

    def where(self, index: int) -> str:
        """Return where an image lies, for messages."""
        return f"{self.root}: {self.name(index)}"

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) if the image is kept as H x W x 3 uint8 pixels, else None."""
        return None

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each decoded image: (images, 2); None if unknown."""
        return None

    def set_rules(self, rules: ImageRules) -> None:
        """Decode by these rules from now on; before the store is picked from or shared."""
        self.rules = rules

    def rules_of(self, index: int) -> ImageRules:
        """Return the rules that an image is decoded by; the data sets of a mixture may differ."""
        return self.rules

    def header(self, index: int, data: Bytes) -> Probe:
        """Read an image's header, ``data`` being what ``read(index)`` returned.

        Raises:
            DataError: it is not an image; names the file.
        """
        raw = self.raw_size(index)
        try:
            return probe(data) if raw is None else Probe(*raw, 0)
        except ValueError as error:
            raise self.cannot_decode(index, error) from error

    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,)."""

    @abstractmethod
    def stamp(self) -> str:
        """Return a text that changes when the files do (names, sizes, modification times)."""

    def blocks(self) -> NDArray[np.int64]:
        """Return which images lie side by side: (images,) numbers of blocks, ascending as they lie.

        See ``blocks``.
        """
        if self._whole is not None:
            return self._whole.blocks()[self.positions]
        return self._blocks()

    def _blocks(self) -> NDArray[np.int64]:
        """Return the blocks of the whole data set; by default images lie in their order."""
        return in_order(len(self))

    def position(self, index: int) -> int:
        """Return the position of an image in the whole data set."""
        return index if self.positions is None else int(self.positions[index])

    def in_whole(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of N images in the whole data set: (N,)."""
        return indices if self.positions is None else self.positions[indices]

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return where the bytes of N images lie in memory, if all of them do.

        Args:
            indices: (N,) positions.

        Returns:
            (N,) addresses and (N,) lengths, valid as long as the store is; None where ``read`` has
            to fetch or unpack them. ``check`` says afterwards whether mapped files were whole.
        """
        return None

    def ahead(self, indices: Sequence[int]) -> None:  # noqa: B027  # some have nothing to do
        """Start to fetch images that will be read soon: from a server, or from a disk."""

    @property
    def is_remote(self) -> bool:
        """Whether images lie on another machine."""
        return isinstance(self.root, RemotePath) or any(
            isinstance(file, RemoteFile) for file in self.files
        )

    def check(self) -> None:
        """Raise if a mapped file has another size now: what was read of it may be wrong.

        Only a few files are checked (0.3 us each).

        Raises:
            FileLostError: names the file.
        """
        if len(self.files) <= _FEW_FILES:
            for file in self.files:
                file.check()

    def is_intact(self, index: int, data: Bytes) -> bool:
        """Tell whether bytes have the checksum of an image; true where none is held."""
        return True

    def decode(self, index: int) -> Image.Image:
        """Decode an image to RGB by the store's rules.

        Raises:
            DataError: the file is missing, truncated, too large or no image; names the file.
        """
        with span("read"):
            data = self.read(index)
        try:
            with span("decode"):
                return decode(data, self.raw_size(index), self.rules_of(index))
        except ValueError as error:
            raise self.cannot_decode(index, error) from error

    def cannot_decode(self, index: int, reason: object) -> ImageError:
        """Return the error that names an image which cannot be decoded.

        Raises:
            FileLostError: the file that it lies in lost bytes: the image is not what is bad.
        """
        for file in self.files:
            file.check()
        return ImageError(
            f"cannot decode {self.where(index)}: {reason}; {self.ways_out()}",
            index=index,
            name=self.name(index),
            reason=str(reason),
        )

    def ways_out(self) -> str:
        """Say what can be done about a bad image."""
        return (
            f"{self.repair}, or convert the others: "
            f"fastsiam convert folder --source {quoted(self.origin or self.root)} --skip-bad"
        )


class PlacedStore(Store):
    """Images that lie in files: each is a range of bytes, see ``_set_places``."""

    columns: ClassVar[tuple[str, ...]] = (
        *Store.columns, "file", "start", "size", "width", "height"
    )  # fmt: skip
    remedy: ClassVar[str] = "fetch it again"
    """What can be done about a damaged file."""
    width: NDArray[Any] | None = None
    height: NDArray[Any] | None = None
    """(images,) sizes in pixels, where the files or their index have them."""

    def _set_places(
        self,
        files: Sequence[File],
        file: NDArray[np.integer],
        start: NDArray[np.integer],
        size: NDArray[np.integer],
    ) -> None:
        """Set where the images lie.

        Args:
            files: mapped, or on another machine.
            file: (images,) number of each image's file.
            start: (images,) where its bytes begin in the file.
            size: (images,) how many there are.

        Raises:
            DataError: a range lies outside of its file.
        """
        self.files, self.file, self.start, self.size = files, file, start, size
        if not files:
            return
        ends = np.array([len(one) for one in files])[file]
        outside = (start < 0) | (size < 0) | (start > ends - size)
        if outside.any():
            index = int(np.argmax(outside))
            path = files[int(file[index])].path
            raise DataError(f"{path} is damaged: image {index} lies outside of it; {self.remedy}")

    def read(self, index: int) -> Bytes:
        """Return an image's bytes: a view into a mapped file, or fetched ones."""
        start = int(self.start[index])
        file: File = self.files[self.file[index]]
        return file.read(start, start + int(self.size[index]))

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in mapped files; None if ``read`` is needed."""
        addresses = [file.address for file in self.files if isinstance(file, Mapped)]
        if len(addresses) < max(1, len(self.files)) or not self.size[indices].all():
            return None
        base = np.array(addresses, np.int64)[self.file[indices]]
        return base + self.start[indices].astype(np.int64), self.size[indices].astype(np.int64)

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each image, if they are known: (images, 2)."""
        if self.width is None or self.height is None:
            return None
        return np.stack([self.height, self.width], axis=1).astype(np.int64)

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        own = np.asarray(indices, np.int64)
        file, start = self.file[own], self.start[own].astype(np.int64)
        stop = start + self.size[own].astype(np.int64)
        for number in np.unique(file).tolist() if self.files else ():
            of_file = file == number
            ranges = zip(start[of_file].tolist(), stop[of_file].tolist(), strict=True)
            self.files[number].ahead(list(ranges))

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image as stored: (images,)."""
        return self.size.astype(np.int64)

    def _blocks(self) -> NDArray[np.int64]:
        return blocks(self.file, self.start)


def picked(store: Store, positions: NDArray[np.int64]) -> Store:
    """Return a store of the same type whose image i is another store's image ``positions[i]``.

    Args:
        store: the images.
        positions: (images,) in the store, in any order; one may be there several times.
    """
    if np.array_equal(positions, np.arange(len(store))):
        return store
    own = copy(store)  # files are open, read and checked already
    for name in own.columns:
        if (column := getattr(store, name)) is not None:
            setattr(own, name, column[positions])
    own._whole, own.positions = store._whole or store, store.in_whole(positions)
    return own


def choose_split(split: Split, files: Sequence[Place], folder: Place) -> list[Place]:
    """Choose a split's files: by a word of their names, or by the folder below ``folder``.

    Where no name tells a split, all are training images.

    Raises:
        NoSplitError: no file is of the split.
    """

    def words(path: Place) -> set[str]:
        return {*re.split(r"[^a-z]+", path.stem.lower())}

    for word in SPLIT_NAMES[split]:
        named = [path for path in files if word in words(path)]
        folders = word, f"{word}.parquet"  # as Spark calls its output
        below = [p for p in files if p.parent != folder and p.parent.name.lower() in folders]
        if named or below:
            return named or below
    known = {word for names in SPLIT_NAMES.values() for word in names}
    if split == "train" and not any(known & words(path) for path in files):
        return list(files)
    raise NoSplitError(f"{folder} has no file of this kind with {split!r} in its name")


def find_split(path: Place, split: Split) -> list[Place]:
    """Return a file of training images; of another split, the files beside it.

    Of ``cats-train.tar`` that is ``cats-val.tar``, not ``dogs-val.tar``.

    Raises:
        NoSplitError: no such file exists, or the file is of another split itself.
    """
    if split == "train":
        return [path]
    if "train" not in path.stem.lower():
        raise NoSplitError(f"{path} has no {split} split beside it")
    beside, begins = list_visible(path.parent, path.suffix), _before_split(path)
    own = [file for file in beside if _before_split(file) == begins]
    return choose_split(split, own, path.parent)


def _before_split(path: Place) -> list[str]:
    """Return the words of a file's name before the first word of a split."""
    return re.findall("[a-z0-9]+", re.split("train|val|test", path.stem.lower(), maxsplit=1)[0])


def list_visible(folder: Place, ending: str) -> list[Place]:
    """Return the files of a folder whose names end so and are not hidden, sorted."""
    visible = (path for path in folder.glob(f"*{ending}") if not path.name.startswith("."))
    return sorted(path for path in visible if path.is_file())


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process did so before."""
    log.warning(message)


def is_image_name(name: str) -> bool:
    """Tell whether a file's name (without folders) ends as an image's does and is not hidden."""
    return name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")


def blocks(file: NDArray[np.integer], offset: NDArray[np.integer]) -> NDArray[np.int64]:
    """Cut images into blocks by where they lie.

    Args:
        file: (images,) number of the file, or shard, that each lies in.
        offset: (images,) where in it, in any unit.

    Returns:
        (images,) number of each one's block, ascending from 0 with file and offset. A block has
        ``BLOCK_IMAGES`` neighbours in one file; a file's last block may have fewer.
    """
    order = np.lexsort((offset, file))
    ordered = np.asarray(file)[order]
    places = np.arange(len(order))
    first = np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, places, 0))
    begins = (places - first) % BLOCK_IMAGES == 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(begins) - 1
    return found


def in_order(images: int) -> NDArray[np.int64]:
    """Cut images into blocks whose positions say where they lie: (images,) block numbers."""
    return np.arange(images) // BLOCK_IMAGES
