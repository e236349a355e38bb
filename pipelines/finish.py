"""The last step of a loader: crops or views become a batch on the training device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops, to_device
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric import photometric

from .store import Store


class Finisher:
    """Makes batches of what a pipeline yields.

    Args:
        store: the images, for their labels, which are kept on the device.
        augment: what becomes of the crops.
        device: where the batches shall lie.
        dtype: floating type of the views.
        resident: whether all images are read already, so that their files may go away.
    """

    def __init__(
        self,
        store: Store,
        augment: AugmentConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        resident: bool = False,
    ) -> None:
        self._store, self._resident = store, resident
        self._augment, self._device, self._dtype = augment, device, dtype
        self._labels = torch.tensor(store.labels, device=device)

    def finish(self, index: NDArray[np.int64], params: ViewParams, crops: Crops) -> Batch:
        """Take a batch's crops through the photometric stage.

        Args:
            index: (N,) positions of the images in the data set.
            params: what becomes of each.
            crops: of the images, on the device.
        """
        return self.batch(index, photometric(crops, params, self._augment, dtype=self._dtype))

    def batch(self, index: NDArray[np.int64], views: tuple[Tensor, ...]) -> Batch:
        """Put views that are finished into a batch.

        Args:
            index: (N,) positions of the images in the data set.
            views: on the device.

        Raises:
            FileLostError: a file lost bytes since it was mapped, so that images may be zeros.
        """
        if not self._resident:
            self._store.check()
        place = to_device(index, self._device)
        return Batch(views, place, self._labels[place])
