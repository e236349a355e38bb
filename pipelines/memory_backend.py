"""The memory pipeline: decodes a data set once and keeps it as uint8 on the training device.

An epoch decodes nothing; it only copies augmentation parameters to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.console import size as human
from fastsiam.console import tally
from fastsiam.environment import USABLE, free_bytes
from fastsiam.errors import DataError, ImageError

from .headers import Headers
from .job import Images, crop_views
from .loaders import Augmented, LoaderSpec
from .native_backend import NativeLoader
from .store import Store
from .store.decode import MOST_PIXELS
from .workers import count, prefetch_map


class MemoryLoader(NativeLoader):
    """The loader of the memory pipeline."""

    reads_files = False

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        self._pixels: Pixels | None = Pixels(spec, self._store)
        self._read = self._pixels.images

    def close(self) -> None:
        """Free the pixels and end the threads."""
        super().close()
        self._pixels = self._read = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps freed memory, which counts as used

    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        pixels = self._pixels
        if self._device.type == "cpu" or pixels is None:
            yield from super()._crops(epoch, skip)
            return
        for step in range(skip, self.steps):
            index = self._order.indices(epoch, step)
            size = pixels.images(index).size
            params = self._draw(epoch, step, size)
            crops = crop_views(pixels.flat, pixels.start[index], size, params, self._augment)
            yield index, params, crops


_PART = 16
"""Images that a thread decodes per call."""

Made = TypeVar("Made")


class Pixels:
    """Decoded images of a store in one tensor on the device, H x W x 3 uint8 each.

    Raises:
        DataError: an image cannot be decoded and bad images are not replaced, or the decoded
            images do not fit.
    """

    def __init__(self, spec: LoaderSpec, store: Store) -> None:
        self._store, self._headers = store, Headers(store)
        self._threads, device = max(1, count(spec.data.workers)), spec.device
        positions = np.arange(len(store)) if spec.order.chosen is None else spec.order.chosen
        self.size = np.zeros((len(store), 2), np.int64)
        """(images of the store, 2) height and width; 0 for images that are not loaded."""
        if (dimensions := store.dimensions()) is not None:
            self.size[positions] = dimensions[positions]
        pixels = self.size[positions].prod(1)
        unknown = positions[(pixels == 0) | (pixels > MOST_PIXELS)]
        for index, size in self._each(self._size, unknown, "reading image sizes"):
            self.size[index] = size
        end = np.cumsum(3 * self.size.prod(1))
        self.start, used, free = end - 3 * self.size.prod(1), int(end[-1]), free_bytes(device)
        """(images of the store,) offset of each image in ``flat``."""
        if used > USABLE * free:
            raise DataError(
                f"{store.root} does not fit: its {len(positions):,} images take {human(used)}, "
                f"more than {USABLE:.0%} of the {human(free)} free on {device}; "
                "use --pipeline native"
            )
        self.flat = torch.empty(used, dtype=torch.uint8, device=device)
        """All pixels."""
        self.refused: dict[int, ImageError] = {}
        """Error of each bad image, by position."""
        for index, error in self._each(self._load, positions, "decoding images"):
            if error:
                if spec.order.bad is None:
                    raise error
                self.refused[index], self.size[index] = error, 0

    def images(self, index: NDArray[np.int64]) -> Images:
        """Return the images at N positions; only those on a CPU have addresses.

        Raises:
            ImageError: one of them could not be decoded.
        """
        for image in index.tolist():
            if image in self.refused:
                raise self.refused[image]
        first = self.flat.data_ptr() if self.flat.device.type == "cpu" else 0
        return Images.of_pixels(first + self.start[index], self.size[index], self.flat)

    def _size(self, index: int) -> tuple[int, int]:
        """Return an image's height and width; 0 if it cannot be decoded."""
        try:
            height, width = self._headers.size(index)
            if height * width > MOST_PIXELS:
                self._store.decode(index)
        except ImageError:  # decoding raises it again, where it is handled
            return 0, 0
        return height, width

    def _load(self, index: int) -> ImageError | None:
        """Decode an image and copy it into its place; return the error of a bad image."""
        try:
            pixels = self._headers.decode_image(index)
            height, width, _ = pixels.shape
            if width * height != self.size[index].prod():
                raise self._store.cannot_decode(index, "it is not as large as its header said")
        except ImageError as error:
            return error
        self.size[index] = height, width
        target = self.flat[self.start[index] :][: pixels.size]
        if target.device.type == "cpu":
            target.numpy()[:] = pixels.reshape(-1)  # torch would start more threads in each thread
        else:
            target.copy_(torch.from_numpy(np.require(pixels.reshape(-1), requirements="W")))
        return None

    def _each(
        self, make: Callable[[int], Made], images: NDArray[np.int64], description: str
    ) -> Iterator[tuple[int, Made]]:
        """Yield each image with ``make(image)``, computed in threads; report the progress."""

        def parts() -> Iterator[list[int]]:
            for first in range(0, len(images), _PART):
                part = images[first : first + _PART].tolist()
                self._store.prefetch(part)
                yield part

        def make_part(part: list[int]) -> list[tuple[int, Made]]:
            return [(index, make(index)) for index in part]

        with tally(description, len(images)) as done:
            for results in prefetch_map(
                make_part, parts(), count=2 * self._threads, threads=self._threads
            ):
                self._store.check()
                done.add(len(results))
                yield from results
