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

from fastsiam.config import DataConfig
from fastsiam.views.draws import ViewParams

from .cuts import Cuts, cut_centres, cut_views
from .dali_cropper import Cropper
from .loaders import Augmented, LoaderSpec
from .native_backend import NativeLoader
from .store import Store


class DaliLoader(NativeLoader):
    """The loader of the DALI pipeline.

    Args:
        spec: as for every loader. There are as many reader threads as threads of DALI.
        dali_resizes: whether DALI crops and resizes too; otherwise the engine does. The default is
            true on a GPU. On a CPU the engine is three times as fast, and bit-identical to PIL.
    """

    decodes_for_gpu = tunes_workers = False

    def __init__(self, spec: LoaderSpec, *, dali_resizes: bool | None = None) -> None:
        super().__init__(spec)
        on_gpu = self._device.type == "cuda"
        resizes = on_gpu if dali_resizes is None else dali_resizes
        self._finishes = not resizes
        self._cropper = Cropper(
            spec.data, self._store, self._shapes, device=self._device, dali_resizes=resizes
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
    data: DataConfig,
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops on the device, as ``native_backend.central_crops``.

    ``resize`` must be at least ``side``: DALI adds no black border.
    """

    def cut(_: int, size: NDArray[np.int64]) -> tuple[tuple[Cuts], None]:
        return (cut_centres(size, resize=resize, side=side),), None

    shapes = [(1, max(map(len, batches)), side, side, 3)]
    cropper = Cropper(data, store, shapes, device=device, dali_resizes=True)
    with contextlib.closing(cropper), contextlib.closing(cropper.crops(batches, cut)) as made:
        for _, _, (crops,) in made:
            yield crops[0]
