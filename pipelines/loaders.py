"""What loaders of images share: epochs, draws, bad images, and copies to a GPU."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import ImageError
from fastsiam.views.batch import Batch, Crops, crop_shapes, to_device
from fastsiam.views.digest import batch_digest
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric

from .order import Order
from .store import Store
from .workers import Closes, close_at_exit

log = logging.getLogger(__name__)

CropTransform = Callable[[Crops], Crops]
"""Changes the uint8 crops of a batch on the device, before the colours are changed."""
Augmented = tuple[NDArray[np.int64], ViewParams, tuple[Tensor, ...]]
"""Of a batch: (N,) positions in the data set of the images that were read, the parameters that were
applied, and the crops or the views on the device."""


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """What the loader of one rank is opened with."""

    data: DataConfig
    """Threads or processes, batches to prepare ahead, and the pipeline's own settings."""
    store: Store | None
    """The images; None for noise."""
    order: Order
    """Which images make up which batch of this rank."""
    augment: AugmentConfig
    """How views are drawn."""
    device: torch.device
    """Device of the views."""
    dtype: torch.dtype = torch.float32
    """Floating type of the views."""
    crop_transform: CropTransform | None = None
    """Is applied to the crops of each batch, before the photometric stage."""


class StoreLoader(ABC):
    """Base class of loaders that read a store; see ``fastsiam.views.batch.Loader``.

    It makes one epoch at a time. A bad image is replaced if ``order.bad`` says so: the epoch starts
    again at its step, where the order has another image.
    """

    reads_files: ClassVar[bool] = True
    """Whether epochs read the store's files."""

    def __init__(self, spec: LoaderSpec) -> None:
        store, order = spec.store, spec.order
        assert store is not None
        self.pipeline = spec.data.pipeline
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self.bad = order.bad
        """The bad images that are known, which others replace; None if one is an error."""
        self._store, self._order, self._augment = store, order, spec.augment
        self._device, self._dtype = spec.device, spec.dtype
        self._shapes = crop_shapes(spec.augment, order.batch // order.world)
        self._labels = torch.tensor(store.labels, device=spec.device)
        self._running: Generator[Augmented] | None = None
        self._owned: list[Closes] = []
        """What is closed with the loader."""
        self._closed = False
        close_at_exit(self)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time.

        Raises:
            DataError: an image cannot be read or decoded; the message names it.
            FileLostError: a mapped file was truncated, so images may contain zeros.
        """
        if self.bad is not None:
            self.bad.share()
        batches = self._batches(number, skip)
        close_at_exit(batches)
        return batches

    def close(self) -> None:
        """End the epoch and the threads or processes, and free memory."""
        self._closed = True
        self._end_epoch()
        for own in self._owned:
            own.close()

    @abstractmethod
    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        """Yield the images, the parameters and the normalised views of each batch."""

    def _draw(self, epoch: int, step: int, size: NDArray[np.integer]) -> ViewParams:
        """Draw the augmentation parameters of a batch, whose images have the sizes (N, 2)."""
        return draw_views(
            self._augment,
            seed=self._order.seed,
            epoch=epoch,
            index=self._order.drawn_for(epoch, step),
            size=size,
        )

    def _batches(self, epoch: int, skip: int) -> Generator[Batch]:
        with contextlib.closing(self._run(self._views, epoch, skip)) as made:
            for step, (index, params, views) in enumerate(made, skip):
                if self.reads_files:
                    self._store.check()
                seen = batch_digest(params, index, epoch=epoch, place=self._order.place(step))
                there = to_device(index, self._device)
                yield Batch(views, there, self._labels[there], seen, params, self._store.name)

    def _run(
        self, start: Callable[[int, int], Generator[Augmented]], epoch: int, skip: int
    ) -> Generator[Augmented]:
        """Yield what ``start(epoch, step)`` yields, and start again at a step with a bad image."""
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._end_epoch()
        step, running = skip, start(epoch, skip)
        self._running = running
        try:
            while running is self._running:
                try:
                    made = next(running, None)
                except ImageError as error:
                    if self.bad is None:
                        raise
                    bad = self.bad.note(error, epoch=epoch, step=epoch * self.steps + step)
                    log.warning(
                        f"bad image {bad.index:,} ({bad.name}): {bad.reason}; another one is shown "
                        "in its place"
                    )
                    self._running = running = start(epoch, step)
                    continue
                if made is None:
                    return
                yield made
                step += 1
        finally:
            running.close()
        if not self._closed:
            raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def _end_epoch(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


class CropLoader(StoreLoader):
    """Base class of loaders whose photometric stage comes after them, where the model runs."""

    def __init__(self, spec: LoaderSpec) -> None:
        if spec.device.type == "cuda":
            from fastsiam.views.photometric import cuda

            cuda.check_compiler()
        super().__init__(spec)
        self._crop_transform = spec.crop_transform

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield the positions, parameters and uint8 crops of each batch of an epoch.

        The next batch overwrites the crops.
        """
        return self._run(self._crops, number, skip)

    @abstractmethod
    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        """Yield the images, the parameters and the crops of each batch."""

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        with contextlib.closing(self._crops(epoch, skip)) as made:
            for index, params, crops in made:
                if self._crop_transform is not None:
                    crops = _transformed(crops, self._crop_transform)
                yield index, params, photometric(crops, params, self._augment, dtype=self._dtype)


def _transformed(crops: Crops, transform: CropTransform) -> Crops:
    """Apply the user's transform, and check that it returns crops like those that it got.

    Raises:
        ValueError: it does not.
    """
    made = transform(crops)
    if made is None:
        raise ValueError("crop_transform must return the crops, and returned None")
    made = tuple(made)
    found = [(tuple(own.shape), own.dtype) for own in made]
    if found != [(own.shape, torch.uint8) for own in crops]:
        shapes = [tuple(own.shape) for own in crops]
        raise ValueError(
            f"crop_transform must return uint8 tensors of shapes {shapes}, and returned {found}"
        )
    return made


def current_gpu(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one of this thread, in which it is GPU 0 at first.

    Otherwise torch would return to GPU 0 after each use of a stream of another GPU, and its
    DataLoader would pin memory there. Either takes half a gigabyte there for each process.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
