"""What loaders share: draws, batches on the training device, copies to a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops, crop_shapes, to_device
from fastsiam.views.digest import seen_in
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric

from .order import Order
from .store import Store


class StoreLoader:
    """Base of the loaders of a store's images; see ``fastsiam.views.batch.Loader``.

    Args:
        store: the images.
        order: which images make up which batch.
        augment: how views are drawn.
        device: where the views shall lie.
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
        """Draw the parameters of a batch whose images have the heights and widths ``size``."""
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
        """Take a batch's crops through the photometric stage.

        Args:
            index: (N,) positions of the images in the data set, as they were read.
            params: the draws of each image, as they were applied.
            crops: of the images, on the device.
            epoch: number of the epoch.
            step: number of the batch in it.
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
        """Put finished views into a batch; the arguments are those of ``_finish``."""
        seen = seen_in(params, index, epoch=epoch, place=self._order.place(step))
        return self._batch(index, views, seen)

    def _batch(self, index: NDArray[np.int64], views: tuple[Tensor, ...], seen: int) -> Batch:
        """Put views whose digest is known into a batch.

        Raises:
            FileLostError: a file lost bytes since it was mapped, so that images may be zeros.
        """
        self._check_files()
        there = to_device(index, self._device)
        return Batch(views, there, self._labels[there], seen)

    def _check_files(self) -> None:
        self._store.check()


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies to a GPU, None for the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def take_over(tensors: Iterable[Tensor], copied: torch.cuda.Event | None) -> None:
    """Let the current stream read what another stream copies, without making the host wait.

    Args:
        tensors: made on the other stream. Once they are freed, their memory is reused only after
            the work that is then queued on the current stream.
        copied: event after which they are complete; None if they are complete.
    """
    if copied is None:
        return
    for tensor in tensors:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(copied)
        tensor.record_stream(stream)
