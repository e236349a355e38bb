"""The memory pipeline: a data set that is decoded once and kept as uint8 on the training device.

An epoch decodes nothing; it only copies augmentation parameters to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.console import size, tally
from fastsiam.environment import LOADING_PEAK, USABLE, free_bytes
from fastsiam.errors import DataError, ImageError
from fastsiam.views.draws import ViewParams

from .engine import Engine
from .headers import Headers
from .job import Images, crop_views
from .loaders import Augmented, CropLoader
from .order import Order
from .store import Store
from .store.decode import MOST_PIXELS
from .workers import count, made_ahead


class MemoryLoader(CropLoader):
    """The loader of the memory pipeline."""

    reads_files = False

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int | str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(store, order, augment, device=device, dtype=dtype)
        self._pixels: Pixels | None = Pixels(
            store, order.chosen, workers, device, keeps_on=order.bad is not None
        )
        self._engine = Engine(store, workers=workers) if device.type == "cpu" else None

    def close(self) -> None:
        """Free the pixels and end the threads."""
        super().close()
        self._pixels = None
        if self._engine is not None:
            self._engine.close()

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        if self._engine is None or self.crop_transform is not None:
            yield from super()._views(epoch, skip)
            return
        for index, params, pixels, start, shape in self._drawn(epoch, skip):
            images = Images.of_pixels(pixels.data_ptr() + start, shape, pixels)
            views = self._engine.make_views(index, images, params, self._augment, self._dtype)
            yield index, params, views

    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        for index, params, pixels, start, shape in self._drawn(epoch, skip):
            yield index, params, crop_views(pixels, start, shape, params, self._augment)

    def _drawn(
        self, epoch: int, skip: int
    ) -> Iterator[
        tuple[NDArray[np.int64], ViewParams, Tensor, NDArray[np.int64], NDArray[np.int64]]
    ]:
        """Yield each batch's images, their parameters, all pixels, and where and how large each is.

        Raises:
            ImageError: one of the images could not be decoded.
        """
        pixels = self._pixels
        assert pixels is not None
        for step in range(skip, self.steps):
            index = self._order.indices(epoch, step)
            for image in index.tolist():
                if image in pixels.refused:
                    raise pixels.refused[image]
            start, size = pixels.start[index], pixels.size[index]
            yield index, self._draw(epoch, step, size), pixels.flat, start, size


_STRETCH_IMAGES, _STRETCH_BYTES = 256, 2**24
"""Images of a stretch, and their decoded bytes, at most; a thread decodes one stretch at a time."""
_BYTES_PER_PIXEL = 8
"""Memory for decoding an image: Pillow keeps 4 bytes per RGB pixel, and as much of the mode that it
converts from, or 3 of the copy."""

Made = TypeVar("Made")


class Pixels:
    """Decoded images of a store in one tensor on the device, H x W x 3 uint8 each.

    Loading takes at most ``LOADING_PEAK`` times their bytes, or their bytes and the memory for
    decoding one image if that is more.

    Args:
        store: the images.
        chosen: positions of the images to load, ascending; None means all.
        workers: threads that decode; fewer are used for few large images.
        device: device of the pixels.
        keeps_on: whether to continue after a bad image, and to raise its error when it is shown.

    Raises:
        DataError: an image cannot be decoded, or the pixels do not fit.
    """

    def __init__(
        self,
        store: Store,
        chosen: NDArray[np.int64] | None,
        workers: int | str,
        device: torch.device,
        *,
        keeps_on: bool,
    ) -> None:
        wanted = np.arange(len(store)) if chosen is None else chosen
        threads, headers = max(1, count(workers)), Headers(store)
        self.size = np.zeros((len(store), 2), np.int64)
        """(images of the store, 2) height and width; 0 for images that were not loaded."""
        self.size[wanted] = _sizes(store, headers, wanted, threads)
        self.refused: dict[int, ImageError] = {}
        """The error of each bad image."""
        end = np.cumsum(3 * self.size.prod(1))
        self.start, used = end - 3 * self.size.prod(1), int(end[-1])
        """(images of the store,) offset of each image in ``flat``."""
        each = _BYTES_PER_PIXEL * int(self.size.prod(1).max(initial=1))
        beside = (LOADING_PEAK - 1) / 2 * used  # half: formats such as 16 bits take twice `each`
        threads = min(threads, max(1, int(beside / each)))
        needed, free = used + (device.type == "cpu") * threads * each, free_bytes(device)
        if needed > USABLE * free:
            raise DataError(
                f"{store.root} does not fit: loading its {len(wanted):,} images takes "
                f"{size(needed)}, more than {USABLE:.0%} of the {size(free)} free on {device}; "
                "use --pipeline native"
            )
        self.flat = torch.empty(used, dtype=torch.uint8, device=device)
        """All pixels."""

        def decode(stretch: NDArray[np.int64]) -> list[ImageError]:
            refused = []
            for index in stretch.tolist():
                try:
                    self._put(store, index, headers.decoded(index))
                except ImageError as error:
                    if not keeps_on:
                        raise
                    refused.append(error)
                    self.size[index] = 0
            store.check()
            return refused

        # Stretches of so many images and bytes; larger images alone.
        place = np.arange(len(wanted)) // _STRETCH_IMAGES + self.start[wanted] // _STRETCH_BYTES
        stretches = np.split(wanted, np.flatnonzero(np.diff(place)) + 1)
        for refused in _each(decode, store, stretches, threads, "decoding images"):
            self.refused |= {error.index: error for error in refused}

    def _put(self, store: Store, index: int, pixels: NDArray[np.uint8]) -> None:
        """Copy an image into its place."""
        height, width, _ = pixels.shape
        if width * height != self.size[index].prod():
            raise store.cannot_decode(index, "it is not as large as its header says")
        self.size[index] = height, width
        target = self.flat[self.start[index] :][: pixels.size]
        if target.device.type == "cpu":
            target.numpy()[:] = pixels.reshape(-1)  # torch would start threads in each thread
        else:
            target.copy_(torch.from_numpy(np.require(pixels.reshape(-1), requirements="W")))


def _sizes(
    store: Store, headers: Headers, wanted: NDArray[np.int64], threads: int
) -> NDArray[np.int64]:
    """Return the sizes of decoded images: (N, 2) height and width; 0 if one cannot be decoded."""

    def read(stretch: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([_size(store, headers, index) for index in stretch.tolist()])

    known = store.dimensions()
    sizes = np.zeros((len(wanted), 2), np.int64) if known is None else known[wanted]
    pixels = sizes.prod(1)
    unknown = np.flatnonzero((pixels == 0) | (pixels > MOST_PIXELS))
    cuts = range(_STRETCH_IMAGES, len(unknown), _STRETCH_IMAGES)
    stretches = np.split(wanted[unknown], cuts) if len(unknown) else []
    found = list(_each(read, store, stretches, threads, "reading sizes of images"))
    if found:
        sizes[unknown] = np.concatenate(found)
    return sizes


def _each(
    make: Callable[[NDArray[np.int64]], Made],
    store: Store,
    stretches: Sequence[NDArray[np.int64]],
    threads: int,
    what: str,
) -> Iterator[Made]:
    """Yield ``make(stretch)`` for each stretch, computed in threads, and show the progress."""

    def fetched() -> Iterator[NDArray[np.int64]]:
        for stretch in stretches:
            store.ahead(stretch.tolist())
            yield stretch

    with tally(what, sum(map(len, stretches))) as done:
        results = made_ahead(make, fetched(), count=2 * threads, threads=threads)
        for stretch, made in zip(stretches, results, strict=True):
            done.add(len(stretch))
            yield made


def _size(store: Store, headers: Headers, index: int) -> tuple[int, int]:
    try:
        height, width = headers.size(index)
        if height * width > MOST_PIXELS:
            store.decode(index)
    except ImageError:  # decoding will raise it again, where it is expected
        return 0, 0
    return height, width
