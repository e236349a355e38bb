"""A small data set, decoded once, kept as uint8 on the training device, augmented there in batches.

An epoch decodes nothing and moves nothing from the host to the device but the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastsiam.config import AugmentConfig
from fastsiam.console import tally
from fastsiam.errors import DataError, ImageError
from fastsiam.views.batch import Batch, Crops
from fastsiam.views.draws import ViewParams, draw_views

from .finish import Finisher
from .geometric import crop_views
from .order import Order
from .room import free_bytes
from .store import Store
from .workers import in_workers


class MemoryLoader:
    """Batches from device memory; see ``fastsiam.views.batch.Loader``."""

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._order, self._augment, self._device, self._dtype = order, augment, device, dtype
        self._pixels: Pixels | None = Pixels(
            store, order.chosen, workers, device, keeps_on=order.bad is not None
        )
        self._finisher = Finisher(store, order, augment, device=device, dtype=dtype, resident=True)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on."""
        if self._device.type == "cuda":
            for step, made in enumerate(self.crops(number, skip=skip), skip):
                yield self._finisher.finish(*made, epoch=number, step=step)
            return
        from .geometric.cpu import Images, make_views  # a GPU does without compiled kernels

        for step, (pixels, chosen, params) in enumerate(self._drawn(number, skip), skip):
            images = Images.of_pixels(
                pixels.flat.data_ptr() + pixels.start[chosen], pixels.size[chosen]
            )
            views = make_views(images, params, self._augment, self._dtype)
            yield self._finisher.made(chosen, params, views, epoch=number, step=step)

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
        for pixels, chosen, params in self._drawn(number, skip):
            size, start = pixels.size[chosen], pixels.start[chosen]
            yield chosen, params, crop_views(pixels.flat, start, size, params, self._augment)

    def _drawn(
        self, epoch: int, skip: int
    ) -> Iterator[tuple[Pixels, NDArray[np.int64], ViewParams]]:
        """Yield the images of each batch of an epoch, and what is drawn for them."""
        if self._pixels is None:
            raise RuntimeError("this loader is closed")
        for step in range(skip, self.steps):
            if (pixels := self._pixels) is None:
                return
            chosen = self._order.indices(epoch, step)
            for index in chosen.tolist():
                if index in pixels.refused:
                    raise pixels.refused[index]
            params = draw_views(
                self._augment,
                seed=self._order.seed,
                epoch=epoch,
                index=self._order.drawn_for(epoch, step),
                size=pixels.size[chosen],
            )
            yield pixels, chosen, params

    def close(self) -> None:
        """Free the pixels."""
        self._pixels = None


_Item = tuple[NDArray[np.int64], Tensor, list[ImageError]] | DataError


class _Decode(Dataset[_Item]):
    """One item is a stretch of images: sizes (n, 2), all their pixels in one uint8 tensor, errors.

    Args:
        store: the images.
        keeps_on: whether a bad one is left out, with no pixels, or is the error that ends it all.
    """

    def __init__(self, store: Store, *, keeps_on: bool) -> None:
        self.store, self.keeps_on = store, keeps_on

    def __getitem__(self, indices: NDArray[np.int64]) -> _Item:
        images: list[NDArray[np.uint8]] = []
        refused: list[ImageError] = []
        for index in indices.tolist():
            try:
                images.append(np.asarray(self.store.decode(index)))
            except DataError as error:
                if not (self.keeps_on and isinstance(error, ImageError)):
                    return error
                refused.append(error)
                images.append(np.empty((0, 0, 3), np.uint8))
        pixels = np.concatenate([image.reshape(-1) for image in images])
        sizes = np.array([image.shape[:2] for image in images])
        return sizes, torch.from_numpy(pixels), refused


class Pixels:
    """Decoded images of a store, H x W x 3 uint8, one after the other on the device.

    Args:
        store: the images.
        chosen: positions of those that are wanted, ascending; None is all.
        workers: processes that decode.
        device: where the pixels shall lie.
        keeps_on: whether a bad image is an error not now, but when it is to be shown.
    """

    def __init__(
        self,
        store: Store,
        chosen: NDArray[np.int64] | None,
        workers: int,
        device: torch.device,
        *,
        keeps_on: bool,
    ) -> None:
        wanted = np.arange(len(store)) if chosen is None else chosen
        stretches = [wanted[i : i + 256] for i in range(0, len(wanted), 256)]
        room, used = free_bytes(device), 0
        sizes: list[NDArray[np.int64]] = []
        parts: list[Tensor] = []
        self.refused: dict[int, ImageError] = {}
        """Of each image without pixels, why."""
        host = torch.device("cpu")
        items = in_workers(
            _Decode(store, keeps_on=keeps_on),
            stretches,
            workers=workers,
            device=host,
            persistent=False,
        )
        for item in _counted(items, len(wanted)):
            if isinstance(item, DataError):
                raise item
            used += len(item[1])
            if 2 * used > 0.8 * room:  # the parts, and then the whole
                raise DataError(
                    f"{store.root} does not fit: {sum(len(part) for part in sizes):,} of "
                    f"{len(wanted):,} images fill four fifths of the {room / 2**30:.1f} GiB free "
                    f"on {device}; use --pipeline torchvision"
                )
            self.refused |= {error.index: error for error in item[2]}
            sizes.append(item[0])
            parts.append(item[1].to(device, copy=True))  # out of the worker's shared memory
        self.size = np.zeros((len(store), 2), np.int64)
        """(images of the store, 2) height and width of each; 0 of those that are not chosen."""
        self.size[wanted] = np.concatenate(sizes)
        count = 3 * self.size.prod(1)
        self.start = np.cumsum(count) - count
        """(images of the store,) where each begins in ``flat``."""
        self.flat = torch.empty(used, dtype=torch.uint8, device=device)
        """All pixels."""
        for part, start in zip(parts, np.cumsum([len(p) for p in parts]), strict=True):
            self.flat[start - len(part) : start].copy_(part)


def _counted(items: Iterable[_Item], images: int) -> Iterator[_Item]:
    """Pass on what is decoded, and show how much of all images that is."""
    with tally("decoding images", images) as done:
        for item in items:
            if not isinstance(item, DataError):
                done.add(len(item[0]))
            yield item
