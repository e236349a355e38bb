"""Parts that loaders share: drawing, building batches, copying to a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops, crop_shapes, to_device
from fastsiam.views.digest import batch_digest
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric

from .order import Order
from .store import Store


class StoreLoader:
    """Base class of loaders that read a store.

    A subclass implements ``epoch``. It calls ``_draw`` for the augmentation parameters of a batch,
    applies them to the images, and builds the batch with ``_finish`` from uint8 crops or with
    ``_with_views`` from normalised views.

    Args:
        store: the images.
        order: which images make up which batch.
        augment: how views are drawn.
        device: device of the views.
        dtype: floating type of the views.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._store, self._order, self._augment = store, order, augment
        self._device, self._dtype = device, dtype
        self._shapes = crop_shapes(augment, order.batch // order.world)
        self._labels = torch.tensor(store.labels, device=device)

    def _draw(self, epoch: int, step: int, size: NDArray[np.integer]) -> ViewParams:
        """Draw the augmentation parameters of a batch.

        Args:
            epoch: number of the epoch.
            step: number of the batch in the epoch.
            size: (N, 2) height and width of each image.
        """
        return draw_views(
            self._augment,
            seed=self._order.seed,
            epoch=epoch,
            index=self._order.drawn_for(epoch, step),
            size=size,
        )

    def _finish(
        self, index: NDArray[np.int64], params: ViewParams, crops: Crops, epoch: int, step: int
    ) -> Batch:
        """Apply the photometric stage to a batch's crops, and build the batch.

        Args:
            index: (N,) positions in the data set of the images that were read.
            params: the augmentation parameters that were applied.
            crops: crops of the images, on the device.
            epoch: number of the epoch.
            step: number of the batch in the epoch.
        """
        views = photometric(crops, params, self._augment, dtype=self._dtype)
        return self._with_views(index, params, views, epoch, step)

    def _with_views(
        self,
        index: NDArray[np.int64],
        params: ViewParams,
        views: tuple[Tensor, ...],
        epoch: int,
        step: int,
    ) -> Batch:
        """Build a batch from normalised views; the other arguments are those of ``_finish``."""
        seen = batch_digest(params, index, epoch=epoch, place=self._order.place(step))
        return self._batch(index, params, views, seen)

    def _batch(
        self, index: NDArray[np.int64], params: ViewParams, views: tuple[Tensor, ...], seen: int
    ) -> Batch:
        """Build a batch from views whose digest is known.

        Raises:
            FileLostError: a mapped file was truncated, so images may contain zeros.
        """
        self._check_files()
        there = to_device(index, self._device)
        return Batch(views, there, self._labels[there], seen, params, self._store.name)

    def _check_files(self) -> None:
        self._store.check()


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new CUDA stream for copies, or None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def take_over(tensors: Iterable[Tensor], copied: torch.cuda.Event | None) -> None:
    """Make the current stream wait for tensors that another stream copies.

    The host does not wait. The allocator reuses the tensors' memory only after the work that the
    current stream has queued when they are freed.

    Args:
        tensors: allocated on the other stream.
        copied: event after which they are complete; None if they are complete already.
    """
    if copied is None:
        return
    for tensor in tensors:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(copied)
        tensor.record_stream(stream)
