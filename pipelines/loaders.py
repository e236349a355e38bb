"""Base classes of image loaders: epochs, augmentation parameters and bad images."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
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
from fastsiam.views.photometric.cpu import free_buffers

from .order import Order
from .store import Store
from .workers import Closes, close_at_exit

log = logging.getLogger(__name__)

CropTransform = Callable[[Crops], Crops]
"""Function that changes a batch's uint8 crops on the device, before the colour operations."""
Augmented = tuple[NDArray[np.int64], ViewParams, tuple[Tensor, ...]]
"""A batch: (N,) positions in the data set of the images that were read, the parameters that were
applied, and the crops or the views on the device."""


@dataclass(frozen=True, slots=True)
class LoaderSpec:
    """Arguments for opening the loader of one rank."""

    data: DataConfig
    """Number of threads or processes, batches to prefetch, and settings of the pipeline."""
    store: Store | None
    """The images; None for noise."""
    order: Order
    """Order of the images, which determines the batches of this rank."""
    augment: AugmentConfig
    """Ranges and probabilities of the augmentations."""
    device: torch.device
    """Device of the views."""
    dtype: torch.dtype = torch.float32
    """Floating type of the views."""
    crop_transform: CropTransform | None = None
    """Function to apply to the crops of each batch, before the photometric stage."""


class StoreLoader(ABC):
    """Base class of loaders that read a store; see ``fastsiam.views.batch.Loader``.

    It runs one epoch at a time. If ``order.bad`` is set, bad images are replaced: the epoch
    restarts at the current step, where the order now has another image.
    """

    reads_files: ClassVar[bool] = True
    """Whether epochs read the store's files."""
    survives_fork: bool = False
    """Whether it works in a forked process, because it has neither threads nor processes."""

    def __init__(self, spec: LoaderSpec) -> None:
        store, order = spec.store, spec.order
        assert store is not None
        self.pipeline = spec.data.pipeline
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self.bad = order.bad
        """Known bad images, which are replaced; None if a bad image is an error."""
        self._store, self._order, self._augment = store, order, spec.augment
        self._device, self._dtype = spec.device, spec.dtype
        self._shapes = crop_shapes(spec.augment, order.batch // order.world)
        self._labels = torch.tensor(store.labels, device=spec.device)
        self._running: Generator[Augmented] | None = None
        self._current = object()
        """Identifies the epoch that was started last."""
        self._lock = threading.RLock()
        """Held while a batch is loaded: another thread ends the epoch only between batches."""
        self._owned: list[Closes] = []
        """Objects that ``close`` closes too."""
        self._closed, self._process = False, os.getpid()
        close_at_exit(self)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; only one epoch can run at a time.

        Raises:
            DataError: an image cannot be read or decoded; the message names it.
            FileLostError: a mapped file was truncated, so images may contain zeros.
            RuntimeError: the loader was closed, or another epoch was started.
        """
        if self.bad is not None:
            self.bad.share()
        batches = self._batches(number, skip)
        close_at_exit(batches)
        return batches

    def close(self) -> None:
        """End the current epoch and the threads or processes, and free memory.

        If another thread is waiting for a batch, it still gets this one, but no further ones.
        """
        self._closed = True
        with self._lock:
            self._end_epoch()
        for resource in self._owned:
            resource.close()
        if self._device.type == "cpu":
            free_buffers()

    @abstractmethod
    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        """Yield the positions, the parameters and the normalised views of each batch."""

    def _draw(self, epoch: int, step: int, size: NDArray[np.integer]) -> ViewParams:
        """Draw the augmentation parameters of a batch; ``size`` is (N, 2), height and width."""
        return draw_views(
            self._augment,
            seed=self._order.seed,
            epoch=epoch,
            index=self._order.draw_numbers(epoch, step),
            size=size,
        )

    def _batches(self, epoch: int, skip: int) -> Generator[Batch]:
        with contextlib.closing(self._run(self._views, epoch, skip)) as batches:
            for step, (index, params, views) in enumerate(batches, skip):
                if self.reads_files:
                    self._store.check()
                digest = batch_digest(params, index, epoch=epoch, place=self._order.place(step))
                positions = to_device(index, self._device)
                yield Batch(
                    views,
                    positions,
                    self._labels[positions],
                    digest,
                    params,
                    self._store.name,
                    torch.from_numpy(np.array(index)),
                )

    def _run(
        self, start: Callable[[int, int], Generator[Augmented]], epoch: int, skip: int
    ) -> Generator[Augmented]:
        """Yield from ``start(epoch, step)``, and restart it at any step with a bad image."""
        if not self.survives_fork and self._process != os.getpid():
            raise RuntimeError(
                "this loader was opened before the process was forked, and its threads exist only "
                "in the parent; open a loader in the child, or use ViewLoader, which does so"
            )
        current = self._current = object()
        step, running = skip, None
        try:
            while True:
                with self._lock:
                    if self._closed or self._current is not current:
                        break
                    if running is None:
                        self._end_epoch()
                        self._running = running = start(epoch, step)
                    try:
                        batch = next(running, None)
                    except ImageError as error:
                        self._note_bad(error, epoch, step)
                        running = None
                        continue
                if batch is None:
                    return
                yield batch
                step += 1
        finally:
            if running is not None:
                _close(running)
        if self._closed:
            raise RuntimeError("this loader is closed")
        raise RuntimeError("another epoch of this loader was started; it runs one at a time")

    def _note_bad(self, error: ImageError, epoch: int, step: int) -> None:
        """Add a bad image to the list; raise the error if bad images are not replaced."""
        if self.bad is None:
            raise error
        if error.index not in self._order.indices(epoch, step):
            return  # the batch was read before another rank shared that the image is bad
        bad_image = self.bad.note(error, epoch=epoch, step=epoch * self.steps + step)
        log.warning(
            f"bad image {bad_image.index:,} ({bad_image.name}): {bad_image.reason}; "
            "another image replaces it"
        )

    def _end_epoch(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            _close(running)


class CropLoader(StoreLoader):
    """Base class of loaders of uint8 crops; the photometric stage runs on the model's device."""

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
        """Yield the positions, the parameters and the crops of each batch."""

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        with contextlib.closing(self._crops(epoch, skip)) as batches:
            for index, params, crops in batches:
                if self._crop_transform is not None:
                    crops = _transform_crops(crops, self._crop_transform)
                yield index, params, photometric(crops, params, self._augment, dtype=self._dtype)


def _close(batches: Generator[Augmented]) -> None:
    """Close a generator, unless it is running: a signal handler, or another thread, closes it."""
    with contextlib.suppress(ValueError):
        batches.close()


def _transform_crops(crops: Crops, transform: CropTransform) -> Crops:
    """Apply the user's transform to the crops.

    Raises:
        ValueError: it returns other shapes, another dtype or tensors on another device.
    """
    result = transform(crops)
    if result is None:
        raise ValueError("crop_transform must return the crops, not None")
    result = tuple(result)
    result_specs = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in result]
    if result_specs != [(tensor.shape, torch.uint8, tensor.device) for tensor in crops]:
        shapes = [tuple(tensor.shape) for tensor in crops]
        raise ValueError(
            f"crop_transform must return uint8 tensors of shapes {shapes} on {crops[0].device}, "
            f"but returned {result_specs}"
        )
    return result


def current_gpu(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current device of this thread, which is GPU 0 by default.

    Otherwise torch would switch back to GPU 0 after each use of another GPU's stream, and its
    DataLoader would pin memory there. Either takes 0.5 GB of GPU 0's memory per process.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
