"""Loader of central crops for evaluation: images are resized, then cropped in the centre."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.errors import ImageError
from fastsiam.views.batch import EvalBatch, to_device
from fastsiam.views.photometric import normalize

from .bad_images import check_number
from .store import Store
from .workers import close_at_exit

log = logging.getLogger(__name__)

MakeCrops = Callable[[Sequence[NDArray[np.int64]]], Generator[Tensor]]
"""Function that yields the crops of batches of positions: (N, S, S, 3) uint8, on the device. The
next batch may overwrite them. It raises a DataError if an image cannot be read or decoded. Its
threads end with the generator."""

_KEEP_BYTES = 2**29
"""Crops up to this size stay on the device between passes; CIFAR-10's two splits take 184 MB."""


class CentralCrops:
    """One rank's share of a store as central crops; see ``fastsiam.views.batch.EvalLoader``.

    Args:
        store: the images.
        crops: function that yields their crops.
        augment: size and normalisation of the crops.
        chosen: positions of all ranks' images.
        batches: positions of the images in each of this rank's batches.
        device: device of the batches.
        dtype: floating type of the batches.
        skips_bad: whether to leave out bad images; otherwise a bad image is an error.
    """

    def __init__(
        self,
        store: Store,
        crops: MakeCrops,
        augment: AugmentConfig,
        *,
        chosen: NDArray[np.int64],
        batches: list[NDArray[np.int64]],
        device: torch.device,
        dtype: torch.dtype,
        skips_bad: bool,
    ) -> None:
        self.images, self.classes = len(chosen), store.classes
        self.labels = store.labels[chosen]
        self._store, self._make, self._augment = store, crops, augment
        self._device, self._dtype = device, dtype
        self._chosen, self._batches = chosen, batches
        self._skips_bad, self._left_out = skips_bad, 0
        self._fits_cache = sum(map(len, batches)) * augment.crop**2 * 3 <= _KEEP_BYTES
        self._cache: list[Tensor] = []

    def names(self) -> list[str]:
        """Return the names of all ranks' images within the data set, in order."""
        return [self._store.name(i) for i in self._chosen.tolist()]

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
        for index, crops in self._crops():
            image = normalize(crops, self._augment)
            yield EvalBatch(
                image=image.to(self._dtype, memory_format=torch.channels_last),
                label=to_device(self._store.labels[index], self._device),
                index=to_device(index, self._device),
            )

    def _crops(self) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        if len(self._cache) == len(self._batches):
            yield from zip(self._batches, self._cache, strict=True)
            return
        cache, batches = list[Tensor](), self._uncached_crops()
        close_at_exit(batches)
        for index, crops in batches:
            if self._fits_cache:
                crops = crops.clone()  # the next batch overwrites them
                cache.append(crops)
            yield index, crops
        self._cache = cache

    def _uncached_crops(self) -> Generator[tuple[NDArray[np.int64], Tensor]]:
        """Yield the positions and the crops of each batch, leaving out bad images."""
        done, left_out_before = 0, self._left_out
        while done < len(self._batches):
            try:
                for crops in self._make(self._batches[done:]):
                    self._store.check()
                    done += 1
                    yield self._batches[done - 1], crops
            except ImageError as error:
                if not self._skips_bad:
                    raise
                self._left_out += 1
                check_number(self._left_out, self.images, error)
                log.warning(
                    f"bad image {error.index:,} ({error.name}): {error.reason}; it is left out"
                )
                rest = self._batches[done][self._batches[done] != error.index]
                self._batches[done : done + 1] = [rest] if len(rest) else []
        if count := self._left_out - left_out_before:
            images, are = ("image", "is") if count == 1 else ("images", "are")
            log.warning(f"{count:,} bad {images} of {self._store.root} {are} left out")
