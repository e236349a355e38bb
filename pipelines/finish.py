"""The last step of a loader: crops or views become a batch on the training device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops, to_device
from fastsiam.views.digest import seen_in
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric import photometric

from .order import Order
from .store import Store


class Finisher:
    """Makes batches of what a pipeline yields.

    Args:
        store: the images, for their labels, which are kept on the device.
        order: of the epochs, for the places of images in the digests of batches.
        augment: what becomes of the crops.
        device: where the batches shall lie.
        dtype: floating type of the views.
        resident: whether all images are read already, so that their files may go away.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        resident: bool = False,
    ) -> None:
        self._store, self._order, self._resident = store, order, resident
        self._augment, self._device, self._dtype = augment, device, dtype
        self._labels = torch.tensor(store.labels, device=device)

    def finish(
        self,
        index: NDArray[np.int64],
        params: ViewParams,
        crops: Crops,
        *,
        epoch: int,
        step: int,
    ) -> Batch:
        """Take a batch's crops through the photometric stage.

        Args:
            index: (N,) positions of the images in the data set, as they were read.
            params: what becomes of each, as it was carried out.
            crops: of the images, on the device.
            epoch: number of the epoch.
            step: number of the batch in it.
        """
        views = photometric(crops, params, self._augment, dtype=self._dtype)
        return self.made(index, params, views, epoch=epoch, step=step)

    def made(
        self,
        index: NDArray[np.int64],
        params: ViewParams,
        views: tuple[Tensor, ...],
        *,
        epoch: int,
        step: int,
    ) -> Batch:
        """Put views that are finished into a batch; the arguments are those of ``finish``."""
        place = self._order.place(step)
        return self.batch(index, views, seen_in(params, index, epoch=epoch, place=place))

    def batch(self, index: NDArray[np.int64], views: tuple[Tensor, ...], seen: int) -> Batch:
        """Put views whose digest is known into a batch.

        Args:
            index: (N,) positions of the images in the data set.
            views: on the device.
            seen: digest of images and draws.

        Raises:
            FileLostError: a file lost bytes since it was mapped, so that images may be zeros.
        """
        if not self._resident:
            self._store.check()
        there = to_device(index, self._device)
        return Batch(views, there, self._labels[there], seen)
