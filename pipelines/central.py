"""Central crops for evaluation: images that are resized and cropped in the middle."""

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
from fastsiam.views.photometric import normalized

from .bad_images import check_number
from .store import Store
from .workers import close_at_exit

log = logging.getLogger(__name__)

MakeCrops = Callable[[Sequence[NDArray[np.int64]]], Generator[Tensor]]
"""Yields the crops of batches of positions in the data set: (N, S, S, 3) uint8, on the device or in
host memory. The next batch may overwrite them. It raises a DataError if an image cannot be read or
decoded. Its threads end with the generator."""

_KEEP_BYTES = 2**29
"""Crops up to this size stay on the device between passes; CIFAR-10's two splits have 184 MB."""


class CentralCrops:
    """One rank's share of a store as central crops; see ``fastsiam.views.batch.EvalLoader``.

    Args:
        store: the images.
        crops: yields their crops.
        skips_bad: whether to leave out bad images; otherwise a bad image is an error.
        augment: as for ``build_eval_loader``, as are the rest.
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
        in_turn: bool,
        device: torch.device,
        dtype: torch.dtype,
        skips_bad: bool,
    ) -> None:
        self.images, self.classes = len(chosen), store.classes
        self.labels = store.labels[chosen]
        self._store, self._make, self._augment = store, crops, augment
        self._device, self._dtype = device, dtype
        rows = np.arange(len(chosen))
        in_one = np.array_split(rows, world)[rank]
        self._rows = rows[rows // batch % world == rank] if in_turn else in_one
        self._chosen, self._share = chosen, chosen[self._rows]
        self._skips_bad, self._left_out = skips_bad, set[int]()
        self._batches = [self._share[i : i + batch] for i in range(0, len(self._share), batch)]
        self._keep = len(self._share) * augment.crop**2 * 3 <= _KEEP_BYTES
        self._kept: list[Tensor] = []

    def names(self) -> list[str]:
        """Return the names of all ranks' images within the data set, in order."""
        return [self._store.name(i) for i in self._chosen.tolist()]

    def rows(self) -> Iterator[int]:
        """Yield which of this rank's images are shown; see ``fastsiam.views.batch.EvalLoader``."""
        for row, image in zip(self._rows.tolist(), self._share.tolist(), strict=True):
            if image not in self._left_out:
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
            crops = made.to(self._device, non_blocking=True)
            if self._keep:
                crops = crops.clone() if crops is made else crops  # the next may overwrite it
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
