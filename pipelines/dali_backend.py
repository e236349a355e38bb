"""NVIDIA DALI: an image is decoded once, on the GPU where there is one, and cropped for each view.

DALI decodes, crops, resizes and flips; which images, which boxes and which flips is fed to it batch
by batch (``dali_cropper``). It reads no file and draws no number itself, so its epochs are those of
every pipeline, and any step can be the first. Evaluation's central crops are made by the same
graph.

On a GPU the resize is PIL's triangle filter in floating point and rounded once, so a pixel of a
crop is within one level of PIL's. Where a box is shrunk, its outermost pixels can be further off:
beyond the box DALI repeats its edge, where PIL does with fewer pixels. On a CPU, where DALI's
resize is slow, DALI only decodes, and the engine crops the images where they lie, to the last bit
as PIL does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch, Crops
from fastsiam.views.draws import ViewParams

from .cuts import Cuts, cut_centres, cut_views
from .dali_cropper import Cropper, Task
from .engine import EncodedBatch, Engine
from .loaders import StoreLoader
from .order import Order
from .store import Store


class DaliLoader(StoreLoader):
    """Batches by DALI.

    Args:
        store: the images.
        order: as for ``StoreLoader``, as are ``augment``, ``device`` and ``dtype``.
        workers: DALI's threads, and as many that read; -1 is one for each core of this rank, and
            there is at least one.
        prefetch: batches in the making while the caller works on one.
        hw_decoder_load: share of the images, 0 to 1, that goes to the GPU's JPEG engine.
        dali_resizes: whether DALI cuts and resizes too, or the decoded images come to our own
            kernels. The first is for GPUs, where it is the default; on a CPU these are three times
            as fast as DALI, and equal PIL's to the last bit.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
        prefetch: int = 2,
        hw_decoder_load: float = 0.9,
        dali_resizes: bool | None = None,
    ) -> None:
        super().__init__(store, order, augment, device=device, dtype=dtype)
        if dali_resizes is None:
            dali_resizes = device.type == "cuda"
        self._engine = None if dali_resizes else Engine(store, workers=workers)
        self._cropper = Cropper(
            store,
            self._shapes,
            workers=workers,
            device=device,
            prefetch=prefetch,
            hw_decoder_load=hw_decoder_load,
            dali_resizes=dali_resizes,
        )

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; it ends when another begins."""
        if self._engine is None:
            for step, made in enumerate(self.crops(number, skip=skip), skip):
                yield self._finish(*made, number, step)
            return
        engine = self._engine

        def make(images: EncodedBatch, params: ViewParams) -> tuple[Tensor, ...]:
            return engine.make_views(images, params, self._augment, self._dtype)

        batches = self._cropper.run(self._tasks(number, skip), make)
        for step, (index, params, views) in enumerate(batches, skip):
            yield self._with_views(index, params, views, number, step)

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``.

        The crops are ready on the device's current stream. The next step overwrites them: fresh
        memory for every batch would cost a tenth of all.

        Raises:
            DataError: an image cannot be read or decoded; names it.
        """
        if self._engine is None:
            return self._cropper.run(self._tasks(number, skip))
        engine, sides = self._engine, list(self._augment.by_side)
        crops = tuple(torch.empty(shape, dtype=torch.uint8) for shape in self._shapes)

        def make(images: EncodedBatch, params: ViewParams) -> Crops:
            cuts = cut_views(params, self._augment)
            engine.submit(images, cuts, sides, crops=crops).result()
            return crops

        return self._cropper.run(self._tasks(number, skip), make)

    def close(self) -> None:
        """End DALI's threads and fastsiam's, and free the memory."""
        self._cropper.close()
        if self._engine is not None:
            self._engine.close()

    def _tasks(self, epoch: int, skip: int) -> Iterator[Task[ViewParams]]:
        return (self._task(epoch, step) for step in range(skip, self.steps))

    def _task(self, epoch: int, step: int) -> Task[ViewParams]:
        def cut(size: NDArray[np.int64]) -> tuple[tuple[Cuts, ...], ViewParams]:
            params = self._draw(epoch, step, size)
            return cut_views(params, self._augment), params

        return Task(f"step {step} of epoch {epoch}", self._order.indices(epoch, step), cut)


def central_crops(
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int,
    prefetch: int,
    hw_decoder_load: float,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops on the device; see ``fastsiam.pipelines.central.MakeCrops``.

    Args:
        store: the images.
        batches: the images of each.
        resize: shorter side before the crop is taken, at least ``side``.
        side: of the crops.
        workers: as for ``DaliLoader``, as are the rest.
        prefetch: batches in the making while the caller works on one.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
        device: where the crops shall lie.
    """

    def cut(size: NDArray[np.int64]) -> tuple[tuple[Cuts], None]:
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
    tasks = (Task(f"images {index[0]} to {index[-1]}", index, cut) for index in batches)
    with contextlib.closing(cropper):
        for _, _, (crops,) in cropper.run(tasks):
            yield crops[0]
