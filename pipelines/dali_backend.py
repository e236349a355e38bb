"""The DALI pipeline: NVIDIA DALI decodes each image once, on the GPU if there is one.

DALI decodes, crops, resizes and flips. It gets the images, boxes and flips of each batch from
``dali_cropper``; it reads no files and draws no random numbers, so its epochs are those of every
pipeline and can start at any step. The same graph makes central crops for evaluation.

On a GPU, DALI resizes by PIL's triangle filter in floating point and rounds once, so a pixel of a
crop differs from PIL's by at most one level. The outermost pixels of a box that is shrunk can
differ more: DALI repeats the edge of the box where PIL uses fewer pixels. On a CPU, where DALI
resizes slowly, it only decodes, and the engine makes crops that are bit-identical to PIL's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams

from .cuts import Cuts, cut_centres, cut_views
from .dali_cropper import Cropper
from .loaders import Augmented
from .native_backend import NativeLoader
from .order import Order
from .store import Store
from .workers import count


class DaliLoader(NativeLoader):
    """The loader of the DALI pipeline.

    Args:
        store: the images.
        order: as for ``StoreLoader``, as are ``augment``, ``device`` and ``dtype``.
        workers: number of DALI's threads, and of reader threads; -1 means one per core of this
            rank. There is at least one.
        prefetch: batches in progress while the caller works on one.
        hw_decoder_load: share of the images, 0 to 1, that the GPU's JPEG engine decodes.
        dali_resizes: whether DALI crops and resizes too; otherwise the engine does. The default is
            true on a GPU. On a CPU the engine is three times as fast, and bit-identical to PIL.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int | str,
        device: torch.device,
        dtype: torch.dtype,
        prefetch: int = 2,
        hw_decoder_load: float = 0.9,
        dali_resizes: bool | None = None,
    ) -> None:
        super().__init__(
            store,
            order,
            augment,
            workers=count(workers),
            prefetch=prefetch,
            device=device,
            dtype=dtype,
        )
        if dali_resizes is None:
            dali_resizes = device.type == "cuda"
        self._finishes = not dali_resizes
        self._cropper = Cropper(
            store,
            self._shapes,
            workers=workers,
            device=device,
            prefetch=prefetch if dali_resizes else max(1, prefetch - 1),  # the engine has one
            hw_decoder_load=hw_decoder_load,
            dali_resizes=dali_resizes,
        )

    def close(self) -> None:
        """End all threads and free the memory."""
        super().close()
        self._cropper.close()

    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        if self._finishes:
            return super()._crops(epoch, skip)

        def cut(number: int, size: NDArray[np.int64]) -> tuple[tuple[Cuts, ...], ViewParams]:
            params = self._draw(epoch, skip + number, size)
            return cut_views(params, self._augment), params

        return self._cropper.crops(self._indices(epoch, skip), cut)

    def _made(self, epoch: int, skip: int, *, finished: bool) -> Generator[Augmented]:
        with (
            contextlib.closing(self._cropper.decoded(self._indices(epoch, skip))) as decoded,
            contextlib.closing(super()._made(epoch, skip, finished=finished)) as made,
        ):
            self._read = lambda _: next(decoded)
            yield from made

    def _indices(self, epoch: int, skip: int) -> Iterator[NDArray[np.int64]]:
        return (self._order.indices(epoch, step) for step in range(skip, self.steps))


def central_crops(
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int | str,
    prefetch: int,
    hw_decoder_load: float,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops on the device; see ``fastsiam.pipelines.central.MakeCrops``.

    Args:
        store: the images.
        batches: positions of each batch's images.
        resize: shorter side of an image before the crop is taken, at least ``side``.
        side: side of the crops, in pixels.
        workers: as for ``DaliLoader``, as are ``prefetch`` and ``hw_decoder_load``.
        prefetch: batches in flight while the caller works on one.
        hw_decoder_load: share of the images that the GPU's JPEG engine decodes.
        device: device of the crops.
    """

    def cut(_: int, size: NDArray[np.int64]) -> tuple[tuple[Cuts], None]:
        return (cut_centres(size, resize=resize, side=side),), None

    cropper = Cropper(
        store,
        [(1, max(map(len, batches)), side, side, 3)],
        workers=workers,
        device=device,
        prefetch=prefetch,
        hw_decoder_load=hw_decoder_load,
        dali_resizes=True,
    )
    with contextlib.closing(cropper), contextlib.closing(cropper.crops(batches, cut)) as made:
        for _, _, (crops,) in made:
            yield crops[0]
