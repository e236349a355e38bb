"""Image headers of a store: the size of each image, and the decoder that it needs."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import ImageError
from fastsiam.kernels.jpeg import decode_corner, decoder

from .job import JPEG, PILLOW, PIXELS, Images
from .store import BetonStore, Store
from .store.base import NewChunk
from .store.decode import MOST_PIXELS
from .store.probe import Bytes

_UNKNOWN = 254
"""Marks an image whose header has not been read yet."""


class Headers:
    """Reads each image's header once, and caches its size and form (``Images.form``).

    Methods raise a DataError that names the file if it cannot be read or decoded.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        if isinstance(store, BetonStore):  # the table of the file has all sizes
            self._height, self._width, self._form = store.height, store.width, store.modes
        else:
            images = len(store)
            self._height, self._width = np.zeros(images, np.int32), np.zeros(images, np.int32)
            self._form = np.full(images, _UNKNOWN, np.uint8)

    @cached_property
    def decode(self) -> int:
        """Address of the function that decodes JPEGs; 0 if Pillow decodes them."""
        return decoder()

    def images(
        self,
        index: NDArray[np.int64],
        address: NDArray[np.int64],
        size: NDArray[np.int64],
        owner: object = None,
    ) -> Images:
        """Return the images at N positions, with known headers; see ``Images`` for the rest."""
        height, width, form = (array[index] for array in (self._height, self._width, self._form))
        if not self.decode:
            form[form == JPEG] = PILLOW
        return Images(address, size, height, width, form, owner)

    def read(self, index: NDArray[np.int64]) -> None:
        """Read the headers of images at N positions, unless they are known.

        Raises:
            DataError: a file is not an image; the message names it.
        """
        for image in index[self._form[index] == _UNKNOWN].tolist():
            self._read(image, self._store.read(image))

    def read_images(self, index: NDArray[np.int64], new_chunk: NewChunk) -> list[Bytes]:
        """Read the images at N positions and any unknown headers; return the images' bytes.

        Raises:
            DataError: a file cannot be read or is not an image; the message names it.
        """
        data = self._store.read_into(index, new_chunk)
        for row in np.flatnonzero(self._form[index] == _UNKNOWN).tolist():
            self._read(int(index[row]), data[row])
        return data

    def size(self, index: int) -> tuple[int, int]:
        """Return the height and width that an image has after decoding.

        Raises:
            DataError: the file cannot be read or is not an image; the message names it.
        """
        self.read(np.array([index]))
        return int(self._height[index]), int(self._width[index])

    def decode_image(self, index: int) -> NDArray[np.uint8]:
        """Read and decode a complete image: (H, W, 3) uint8, bit-identical to Pillow's pixels.

        Raises:
            DataError: it cannot be read or decoded; the message names it.
        """
        data = self._store.read(index)
        if self._form[index] == _UNKNOWN:
            self._read(index, data)
        height, width = int(self._height[index]), int(self._width[index])
        if self.decode and self._form[index] == JPEG and height * width <= MOST_PIXELS:
            pixels = decode_corner(data, height, width, rows=height, columns=width)
            if pixels is not None:
                return pixels[: 3 * height * width].reshape(height, width, 3)
        return np.asarray(self._store.decode(index, data))

    def _read(self, index: int, data: Bytes) -> None:
        store = self._store
        try:
            head = store.header(index, data)
        except ImageError:  # Pillow reads some files whose headers ``probe`` rejects
            image = store.decode(index, data)
            (height, width), form = (image.height, image.width), PILLOW
        else:
            rules = store.rules_of(index)
            height, width = rules.size(head)
            form = JPEG
            if store.raw_size(index) is not None:
                form = PIXELS
            elif rules.needs_pillow(head):
                form = PILLOW
        self._height[index], self._width[index] = height, width
        self._form[index] = form  # last, because other threads check it first
