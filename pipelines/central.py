"""Central crops: images as evaluation sees them, resized, cropped in the middle, not augmented."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import EvalBatch, to_device
from fastsiam.views.photometric import normalized

from .store import Store
from .workers import closes_at_exit

MakeCrops = Callable[[Sequence[NDArray[np.int64]]], Generator[Tensor]]
"""Makes the crops of batches, given as positions in the data set: (N, S, S, 3) uint8, on the device
or on their way to it, which the next batch's may overwrite. Raises DataError where an image cannot
be read or decoded. Its threads or processes end with the iterator."""

_KEEP_BYTES = 2**29
"""Crops of up to so many bytes are kept on the device between passes, a byte a value: CIFAR-10's
two splits, 184 MB, are loaded once a run."""


class CentralCrops:
    """One rank's share of a store as central crops; see ``fastsiam.views.batch.EvalLoader``.

    Args:
        store: the images.
        crops: makes their crops.
        augment: for the crops' side and the normalisation.
        chosen: positions of the images that are wanted.
        batch: images in a batch of this rank.
        rank: this process's number; it gets every ``world``-th part of the images.
        world: number of processes.
        device: where the images shall lie.
        dtype: floating type of the images.
    """

    def __init__(
        self,
        store: Store,
        crops: MakeCrops,
        augment: AugmentConfig,
        *,
        chosen: NDArray[np.int64],
        batch: int,
        rank: int,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.images, self.classes = len(chosen), store.classes
        self.labels = store.labels[chosen]
        self._store, self._make, self._augment = store, crops, augment
        self._device, self._dtype = device, dtype
        self._share = np.array_split(chosen, world)[rank]
        self._batches = [self._share[i : i + batch] for i in range(0, len(self._share), batch)]
        self._keep = len(self._share) * augment.crop**2 * 3 <= _KEEP_BYTES
        self._kept: list[Tensor] = []

    def names(self) -> list[str]:
        """Return the names of this rank's images within the data set, in order."""
        return [self._store.name(i) for i in self._share.tolist()]

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
        for index, crops in zip(self._batches, self._crops(), strict=True):
            image = normalized(crops, self._augment)
            yield EvalBatch(
                image=image.to(self._dtype, memory_format=torch.channels_last),
                label=to_device(self._store.labels[index], self._device),
                index=to_device(index, self._device),
            )

    def _crops(self) -> Iterator[Tensor]:
        if len(self._kept) == len(self._batches):
            yield from self._kept
            return
        kept: list[Tensor] = []
        for made in closes_at_exit(self._make(self._batches)):
            self._store.check()
            crops = made.to(self._device, non_blocking=True)
            if self._keep:
                crops = crops.clone() if crops is made else crops  # the next may overwrite it
                kept.append(crops)
            yield crops
        self._kept = kept
