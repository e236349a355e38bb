"""Several stores as one: the parts of a conversion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, ImageError

from ..remote.path import Place
from .base import Store
from .decode import ImageRules
from .files import File
from .probe import Bytes


class JoinedStore(Store):
    """The images of several stores, one store after the other.

    Raises:
        DataError: the stores do not have the same classes.
    """

    kind = "parts of a conversion"

    def __init__(self, root: Place, stores: Sequence[Store]) -> None:
        self.root, self.stores = root, stores
        self.classes = stores[0].classes
        for store in stores[1:]:
            if store.classes != self.classes:
                raise DataError(f"{store.root} has other classes than {stores[0].root}")
        self.labels = np.concatenate([store.labels for store in stores])
        self._first = np.cumsum([0, *map(len, stores)])

    def read(self, index: int) -> Bytes:
        """Return an image's bytes."""
        store, own = self._find(index)
        try:
            return store.read(own)
        except ImageError as error:
            raise error.at(index) from error

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        own: dict[int, list[int]] = {}
        for index in indices:
            number = int(np.searchsorted(self._first, index, side="right")) - 1
            own.setdefault(number, []).append(index - int(self._first[number]))
        for number, images in own.items():
            self.stores[number].ahead(images)

    def set_rules(self, rules: ImageRules) -> None:
        """Pass the rules on: each part knows how it was converted."""
        for store in self.stores:
            store.set_rules(rules)

    def mapped(self) -> Sequence[File]:
        """Return the files of all stores."""
        return [file for store in self.stores for file in store.mapped()]

    def name(self, index: int) -> str:
        """Return an image's name."""
        store, own = self._find(index)
        return store.name(own)

    def where(self, index: int) -> str:
        """Return where an image lies, for messages."""
        store, own = self._find(index)
        return store.where(own)

    def raw_size(self, index: int) -> tuple[int, int] | None:
        """Return (height, width) of an image that is stored as pixels."""
        store, own = self._find(index)
        return store.raw_size(own)

    def is_intact(self, index: int, data: Bytes) -> bool:
        """Tell whether bytes have the checksum of an image; true where none is held."""
        store, own = self._find(index)
        return store.is_intact(own, data)

    def dimensions(self) -> NDArray[np.int64] | None:
        """Return height and width of each image: (images, 2); None if a store knows none."""
        found = [own for store in self.stores if (own := store.dimensions()) is not None]
        return np.concatenate(found) if len(found) == len(self.stores) else None

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image: (images,)."""
        return np.concatenate([store.sizes() for store in self.stores])

    def blocks(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks that images lie in, one store's after the other's."""
        parts = [store.blocks() for store in self.stores]
        before = np.cumsum([0, *(part.max(initial=-1) + 1 for part in parts)])
        return np.concatenate([first + part for first, part in zip(before, parts, strict=False)])

    def stamp(self) -> str:
        """Return a text that changes with any of the stores."""
        return " ".join(store.stamp() for store in self.stores)

    def _find(self, index: int) -> tuple[Store, int]:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        return self.stores[number], index - int(self._first[number])
