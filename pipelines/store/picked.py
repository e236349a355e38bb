"""Other positions for a store's images: some of them, in another order, or one in several places.

Order, draws and pipelines know positions alone. So what they see of a data set can be changed here,
and they need not know of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import ImageError

from .base import NewChunk, Store
from .beton import BetonStore
from .files import File
from .probe import Bytes


def picked(store: Store, positions: NDArray[np.int64]) -> Store:
    """Return a store whose image i is another store's image ``positions[i]``.

    Args:
        store: the images; a .beton file stays one, for pipelines that read nothing else.
        positions: (images,) in the store, in any order; one may be there several times.
    """
    if np.array_equal(positions, np.arange(len(store))):
        return store
    if isinstance(store, BetonStore):
        return PickedBeton(store, positions)
    return PickedStore(store, positions)


class PickedStore(Store):
    """Images of a store by other positions; see ``picked``."""

    def __init__(self, store: Store, positions: NDArray[np.int64]) -> None:
        self.kind, self.root, self.classes = store.kind, store.root, store.classes  # type: ignore[misc]
        self.labels = store.labels[positions]
        self.groups = None if store.groups is None else store.groups[positions]
        self._store, self._positions, self.rules = store, positions, store.rules

    def read(self, index: int) -> Bytes:
        """Return an image's bytes."""
        try:
            return self._store.read(int(self._positions[index]))
        except ImageError as error:
            raise error.at(index) from error

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the bytes of several images."""
        positions = self._positions[indices]
        try:
            return self._store.read_into(positions, new_chunk)
        except ImageError as error:
            place = np.flatnonzero(positions == error.index)[0]
            raise error.at(int(indices[place])) from error

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return where images lie in memory, as the store says."""
        return self._store.locate(self._positions[indices])

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        self._store.ahead(self._positions[np.asarray(indices, np.int64)].tolist())

    def mapped(self) -> Sequence[File]:
        """Return the store's files."""
        return self._store.mapped()

    def name(self, index: int) -> str:
        """Return an image's name."""
        return self._store.name(int(self._positions[index]))

    def where(self, index: int) -> str:
        """Return where an image lies, for messages."""
        return self._store.where(int(self._positions[index]))

    def cannot_decode(self, index: int, reason: object) -> ImageError:
        """Return the error that names an image which cannot be decoded, and its source."""
        return self._store.cannot_decode(int(self._positions[index]), reason).at(index)

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) of an image that is stored as pixels."""
        return self._store.raw_size(int(self._positions[index]))

    def is_intact(self, index: int, data: Bytes) -> bool:
        """Tell whether bytes have the checksum of an image; true where none is held."""
        return self._store.is_intact(int(self._positions[index]), data)

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each image: (images, 2); None if only its header tells."""
        known = self._store.dimensions()
        return None if known is None else known[self._positions]

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,)."""
        return self._store.sizes()[self._positions]

    def blocks(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks that images lie in."""
        return self._store.blocks()[self._positions]

    def stamp(self) -> str:
        """Return a text that changes with the files, and with what is picked of them."""
        return _stamp(self._store, self._positions)


class PickedBeton(BetonStore):
    """Images of a .beton file by other positions: the same file, another table of its records."""

    def __init__(self, store: BetonStore, positions: NDArray[np.int64]) -> None:
        self.__dict__.update(store.__dict__)  # the file is open, read and checked already
        self._store, self._positions = store, positions
        self.modes, self.width, self.height = (
            column[positions] for column in (store.modes, store.width, store.height)
        )
        self.start, self.bytes = store.start[positions], store.bytes[positions]
        self.labels = store.labels[positions]
        self.crc = None if store.crc is None else store.crc[positions]

    def in_file(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return at which positions of the file some images lie."""
        return self._store.in_file(self._positions[indices])

    def name(self, index: int) -> str:
        """Return the image's name in the data set that the file was made of."""
        return self._store.name(int(self._positions[index]))

    def where(self, index: int) -> str:
        """Return file, position and name, for messages."""
        return self._store.where(int(self._positions[index]))

    def stamp(self) -> str:
        """Return a text that changes with the file, and with what is picked of it."""
        return _stamp(self._store, self._positions)


def _stamp(store: Store, positions: NDArray[np.int64]) -> str:
    return f"{store.stamp()} {zlib.crc32(positions.tobytes()):08x} {len(positions)}"
