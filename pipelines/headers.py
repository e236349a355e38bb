"""Sizes and forms of a store's images, from their headers."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import ImageError
from fastsiam.kernels import library

from .job import JPEG, PILLOW, PIXELS, Images
from .store import BetonStore, Store
from .store.base import Allocate
from .store.probe import Bytes

log = logging.getLogger(__name__)

_UNKNOWN = 254
"""Form of an image whose header was not read yet."""


class Headers:
    """Sizes and forms of a store's images: each header is read once and then remembered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.decode = decoder()
        """Address of the function that decodes JPEGs; 0: Pillow does."""
        if isinstance(store, BetonStore):  # its table has them all
            self._height, self._width, self._form = store.height, store.width, store.modes
        else:
            images = len(store)
            self._height, self._width = np.zeros(images, np.int32), np.zeros(images, np.int32)
            self._form = np.full(images, _UNKNOWN, np.uint8)
        if not self.decode:
            self._form = np.where(self._form == JPEG, np.uint8(PILLOW), self._form)

    def images(
        self, index: NDArray[np.int64], address: NDArray[np.int64], size: NDArray[np.int64]
    ) -> Images:
        """Return images whose headers are read.

        Args:
            index: (N,) positions in the store.
            address: (N,) of each one's first byte.
            size: (N,) bytes of each.
        """
        form = self._form[index]
        return Images(address, size, self._height[index], self._width[index], form)

    def read(self, index: NDArray[np.int64]) -> None:
        """Read the headers of images, as far as they are unknown.

        Raises:
            DataError: it is not an image; names it.
        """
        for image in index[self._form[index] == _UNKNOWN].tolist():
            self._read(image, self._store.read(image))

    def read_image(self, index: int, allocate: Allocate) -> Bytes | None:
        """Read an image's bytes, and its header if it is unknown; None if Pillow is to read it.

        Args:
            index: position in the store.
            allocate: see ``Store.read_into``.

        Raises:
            DataError: it cannot be read, or is not an image; names it.
        """
        if self._form[index] == PILLOW:
            return None
        data = self._store.read_into(index, allocate)
        if self._form[index] == _UNKNOWN:
            self._read(index, data)
        return data

    def _read(self, index: int, data: Bytes) -> None:
        store = self._store
        try:
            head = store.header(index, data)
        except ImageError:  # Pillow reads some files whose header this program refuses
            image = store.decode(index)
            (height, width), form = (image.height, image.width), PILLOW
        else:
            height, width = store.rules.size(head)
            form = JPEG
            if store.raw_size(index) is not None:
                form = PIXELS
            elif store.rules.needs_pillow(head) or not self.decode:
                form = PILLOW
        self._height[index], self._width[index] = height, width
        self._form[index] = form  # last: other threads read it first


@cache
def decoder() -> int:
    """Return the address of the function that decodes JPEGs (``Decode`` in ``source/job.h``).

    0 if fastsiam was compiled without libjpeg-turbo: Pillow decodes then.
    """
    if (jpeg := library.jpeg()) is None:
        log.warning(
            "fastsiam was compiled without libjpeg-turbo's header: Pillow decodes JPEGs, which is "
            "slower; install libjpeg-dev and run python -m fastsiam.kernels.build"
        )
        return 0
    return library.address(jpeg.fastsiam_decode)
