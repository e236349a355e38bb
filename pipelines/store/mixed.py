"""Concatenation of several data sets into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import ImageError

from .base import NewChunk, Store
from .decode import ImageRules
from .probe import Bytes


class MixedStore(Store):
    """The images of several data sets, one after the other.

    An image's name starts with the number of its data set, such as ``1/class/file.jpg``. Classes
    with the same name in different data sets are one class.
    """

    columns: ClassVar[tuple[str, ...]] = (*Store.columns, "sets")
    repair = "repair the image, or train on another one in its place with --bad-images replace"
    sets: NDArray[np.int64]

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self.kind = f"{len(stores)} data sets: {', '.join(str(store.root) for store in stores[1:])}"
        self.root = stores[0].root
        # for messages; .beton files always have the default rules
        self.rules = next((s.rules for s in stores if s.rules != ImageRules()), ImageRules())
        self.files = [file for store in stores for file in store.files]
        lengths = [len(store) for store in stores]
        self._first = np.cumsum([0, *lengths])
        self.sets = np.repeat(np.arange(len(stores)), lengths)
        self.classes = tuple(dict.fromkeys(name for store in stores for name in store.classes))
        number = {name: label for label, name in enumerate(self.classes)}
        new_labels = []
        for store in stores:
            number_of = np.array([*(number[name] for name in store.classes), -1])
            new_labels.append(number_of[store.labels])  # -1 stays -1, the last one
        self.labels = np.concatenate(new_labels)
        dimensions = [known for store in stores if (known := store.dimensions()) is not None]
        if len(dimensions) == len(stores):
            self.height, self.width = np.concatenate(dimensions).T

    def __str__(self) -> str:
        return " and ".join(map(str, self._stores))

    def check(self) -> None:
        """Raise if a mapped file's size has changed; see ``Store.check``."""
        for store in self._stores:
            store.check()

    def read(self, index: int) -> Bytes:
        """Return an image's bytes.

        Raises:
            ImageError: the image has no bytes; it has the mixture's index and name.
        """
        store, position = self._place(index)
        try:
            return store.read(position)
        except ImageError as error:
            raise self.cannot_decode(index, error.reason) from error

    def read_into(self, indices: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Return the bytes of several images; raise like ``read``."""
        images: dict[int, Bytes] = {}
        for store, rows, positions in self._parts(indices):
            try:
                part_images = store.read_into(positions, new_chunk)
            except ImageError as error:
                row = rows[np.flatnonzero(positions == error.index)[0]]
                raise self.cannot_decode(int(indices[row]), error.reason) from error
            images |= dict(zip(rows.tolist(), part_images, strict=True))
        return [images[row] for row in range(len(indices))]

    def name(self, index: int) -> str:
        """Return an image's name, prefixed with the number of its data set."""
        store, position = self._place(index)
        return f"{self.sets[index]}/{store.name(position)}"

    def where(self, index: int) -> str:
        """Return the location of an image, for messages."""
        store, position = self._place(index)
        return store.where(position)

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) if the image is stored as raw pixels, else None."""
        store, position = self._place(index)
        return store.raw_size(position)

    def rules_of(self, index: int) -> ImageRules:
        """Return the decoding rules of an image's data set."""
        store, position = self._place(index)
        return store.rules_of(position)

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each image in bytes: (images,)."""
        sizes = np.concatenate([store.sizes() for store in self._stores])
        return sizes[self.full_positions(np.arange(len(self)))]

    def stamp(self) -> str:
        """Return the fingerprints of all data sets, one per line."""
        return "\n".join(store.stamp() for store in self._stores)

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return the addresses and lengths of images in memory, or None; see ``Store.locate``."""
        addresses, lengths = np.empty((2, len(indices)), np.int64)
        for store, rows, positions in self._parts(indices):
            location = store.locate(positions)
            if location is None:
                return None
            addresses[rows], lengths[rows] = location
        return addresses, lengths

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to prefetch images that will be read soon."""
        for store, _, positions in self._parts(np.asarray(indices, np.int64)):
            store.prefetch(positions.tolist())

    def _blocks(self) -> NDArray[np.int64]:
        columns, first = [], 0
        for store in self._stores:
            columns.append(store.blocks() + first)
            first = int(columns[-1].max(initial=first - 1)) + 1
        return np.concatenate(columns)

    def _place(self, index: int) -> tuple[Store, int]:
        """Return the data set of an image, and the image's position in it."""
        number = self.sets[index]
        return self._stores[number], self.position(index) - int(self._first[number])

    def _parts(
        self, indices: NDArray[np.int64]
    ) -> Iterator[tuple[Store, NDArray[np.int64], NDArray[np.int64]]]:
        """Group images by data set: yield it, rows of ``indices`` and their positions in it."""
        sets = self.sets[indices]
        within = self.full_positions(indices) - self._first[sets]
        for number in np.unique(sets).tolist():
            rows = np.flatnonzero(sets == number)
            yield self._stores[number], rows, within[rows]
