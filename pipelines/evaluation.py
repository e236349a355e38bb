"""Images as evaluation sees them: resized, centrally cropped, not augmented."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.batch import EvalBatch, to_device
from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.photometric import normalize

from .store import Store
from .workers import in_workers

_KEEP_BYTES = 2**30
"""Crops of up to so many bytes are kept between passes: CIFAR-10 is decoded once a run."""


class _Crops(Dataset[Tensor | DataError]):
    """One item is a batch of crops (N, S, S, 3) uint8, or the error that stopped it."""

    def __init__(self, store: Store, resize: int, crop: int) -> None:
        self.store, self.resize, self.crop = store, resize, crop

    def __getitem__(self, indices: NDArray[np.int64]) -> Tensor | DataError:
        try:
            return torch.from_numpy(np.stack([self._crop(i) for i in indices.tolist()]))
        except DataError as error:
            return error

    def _crop(self, index: int) -> NDArray[np.uint8]:
        image = TF.resize(self.store.decode(index), [self.resize], InterpolationMode.BILINEAR)
        return np.asarray(TF.center_crop(image, [self.crop, self.crop]))


class CentralCrops:
    """One rank's share of a store as central crops; see ``fastsiam.batch.EvalLoader``."""

    def __init__(
        self,
        store: Store,
        augment: AugmentConfig,
        *,
        resize: int,
        batch: int,
        workers: int,
        rank: int,
        world: int,
        device: torch.device,
    ) -> None:
        self.images, self.classes = len(store), store.classes
        self._augment, self._workers, self._device = augment, workers, device
        self._dataset = _Crops(store, resize, augment.crop)
        share = np.array_split(np.arange(len(store)), world)[rank]
        self._tasks = [share[i : i + batch] for i in range(0, len(share), batch)]
        self._labels = store.labels
        self._keep = len(share) * augment.crop**2 * 3 <= _KEEP_BYTES
        self._kept: list[Tensor] = []

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
        for task, crops in zip(self._tasks, self._crops(), strict=True):
            image = crops.to(self._device, non_blocking=True).permute(0, 3, 1, 2).float()
            image = normalize(image, self._augment).contiguous(memory_format=torch.channels_last)
            yield EvalBatch(image, to_device(self._labels[task], self._device))

    def _crops(self) -> Iterator[Tensor]:
        if len(self._kept) == len(self._tasks):
            yield from self._kept
            return
        self._kept.clear()
        for item in in_workers(
            self._dataset, self._tasks, workers=self._workers, device=self._device, persistent=False
        ):
            if isinstance(item, DataError):
                raise item
            if self._keep:
                self._kept.append(item.clone())  # out of the worker's shared memory
            yield item
