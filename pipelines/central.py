"""Central crops for evaluation: images that are resized and cropped in the middle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.errors import ImageError
from fastsiam.views.batch import EvalBatch, to_device
from fastsiam.views.photometric import normalized

from .bad_images import check_number
from .store import Store
from .workers import close_at_exit

log = logging.getLogger(__name__)

MakeCrops = Callable[[Sequence[NDArray[np.int64]]], Generator[Tensor]]
"""Yields the crops of batches of positions in the data set: (N, S, S, 3) uint8, on the device. The
next batch may overwrite them. It raises a DataError if an image cannot be read or
decoded. Its threads end with the generator."""

_KEEP_BYTES = 2**29
"""Crops up to this size stay on the device between passes; CIFAR-10's two splits have 184 MB."""


def share_of(
    images: int, *, batch: int, rank: int, world: int, in_turn: bool
) -> list[NDArray[np.int64]]:
    """Return the numbers of the images in each of a rank's batches; see ``build_eval_loader``."""

    def batches(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return [rows[i : i + batch] for i in range(0, len(rows), batch)]

    rows = np.arange(images)
    return batches(rows)[rank::world] if in_turn else batches(np.array_split(rows, world)[rank])


class CentralCrops:
    """One rank's share of a store as central crops; see ``fastsiam.views.batch.EvalLoader``.

    Args:
        store: the images.
        crops: yields their crops.
        augment: for the normalisation.
        chosen: positions of all ranks' images.
        rows: numbers of the chosen images in each of this rank's batches.
        device: device of the images.
        dtype: floating type of the images.
        skips_bad: whether to leave out bad images; otherwise a bad image is an error.
    """

    def __init__(
        self,
        store: Store,
        crops: MakeCrops,
        augment: AugmentConfig,
        *,
        chosen: NDArray[np.int64],
        rows: Sequence[NDArray[np.int64]],
        device: torch.device,
        dtype: torch.dtype,
        skips_bad: bool,
    ) -> None:
        self.images, self.classes = len(chosen), store.classes
        self.labels = store.labels[chosen]
        self._store, self._make, self._augment = store, crops, augment
        self._device, self._dtype = device, dtype
        self._chosen, self._rows = chosen, rows
        self._skips_bad, self._left_out = skips_bad, set[int]()
        self._batches = [chosen[own] for own in rows]
        self._keep = sum(map(len, rows)) * augment.crop**2 * 3 <= _KEEP_BYTES
        self._kept: list[Tensor] = []

    def names(self) -> list[str]:
        """Return the names of all ranks' images within the data set, in order."""
        return [self._store.name(i) for i in self._chosen.tolist()]

    def rows(self) -> Iterator[int]:
        """Yield which of this rank's images are shown; see ``fastsiam.views.batch.EvalLoader``."""
        for row in chain.from_iterable(own.tolist() for own in self._rows):
            if self._chosen[row] not in self._left_out:
                yield row

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
        for index, crops in self._crops():
            image = normalized(crops, self._augment)
            yield EvalBatch(
                image=image.to(self._dtype, memory_format=torch.channels_last),
                label=to_device(self._store.labels[index], self._device),
                index=to_device(index, self._device),
            )

    def _crops(self) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield the positions and the crops of each batch, on the device."""
        if len(self._kept) == len(self._batches):
            yield from zip(self._batches, self._kept, strict=True)
            return
        kept: list[Tensor] = []
        batches = self._made()
        close_at_exit(batches)
        for index, made in batches:
            crops = made.clone() if self._keep else made  # the next may overwrite it
            if self._keep:
                kept.append(crops)
            yield index, crops
        self._kept = kept

    def _made(self) -> Generator[tuple[NDArray[np.int64], Tensor]]:
        """Yield the positions and the crops of each batch, without bad images."""
        done, known = 0, len(self._left_out)
        while done < len(self._batches):
            try:
                for made in self._make(self._batches[done:]):
                    self._store.check()
                    done += 1
                    yield self._batches[done - 1], made
            except ImageError as error:
                if not self._skips_bad or error.index in self._left_out:
                    raise
                self._left_out.add(error.index)
                check_number(len(self._left_out), self.images, error)
                log.warning(
                    f"bad image {error.index:,} ({error.name}): {error.reason}; it is left out"
                )
                rest = self._batches[done][self._batches[done] != error.index]
                self._batches[done : done + 1] = [rest] if len(rest) else []
        if found := len(self._left_out) - known:
            images, are = ("image", "is") if found == 1 else ("images", "are")
            log.warning(f"{found:,} bad {images} of {self._store.root} {are} left out")
