"""The baseline: PIL images and torchvision's functional operations in DataLoader workers.

This is what users have today, with the drawn parameters in the place of torchvision's own draws. It
is the reference of every other pipeline, so it shares no augmentation code with them.

Evaluation's central crops are PIL's too, for every pipeline that has no faster way to them.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.trace import span
from fastsiam.views.batch import Batch
from fastsiam.views.draws import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    NO_LEVEL,
    SATURATION,
    ViewParams,
    draw_views,
)
from fastsiam.views.photometric.operations import in_views_order

from .finish import Finisher
from .order import Order
from .store import Store
from .workers import closes_at_exit, in_workers, shut_down

_JITTER = {
    BRIGHTNESS: TF.adjust_brightness,
    CONTRAST: TF.adjust_contrast,
    SATURATION: TF.adjust_saturation,
    HUE: TF.adjust_hue,
}


def apply_view(
    image: Image.Image, params: ViewParams, view: int, row: int, config: AugmentConfig
) -> Image.Image:
    """Make one view of one PIL image, with torchvision's operations in the paper's order.

    Args:
        image: the source, RGB.
        params: of a batch.
        view: its number.
        row: the image's place in the batch.
        config: for the side of the view, and whether it has a hue.

    Returns:
        The view before normalisation, RGB, as many pixels square as its side.
    """
    top, left, height, width = params.box[view, row].tolist()
    own = config.views[view]
    side = [own.crop, own.crop]
    with span("crop"):
        image = TF.resized_crop(image, top, left, height, width, side, InterpolationMode.BILINEAR)
    with span("photometric"):
        if params.jitter[view, row]:
            for op in params.order[view, row].tolist():
                if op == HUE and own.hue == 0:
                    continue
                image = _JITTER[op](image, float(params.factor[view, row, op]))
        if params.gray[view, row]:
            image = TF.rgb_to_grayscale(image, num_output_channels=3)
        if params.blur[view, row]:
            image = image.filter(ImageFilter.GaussianBlur(float(params.blur[view, row])))
        if params.solarise[view, row] != NO_LEVEL:
            image = TF.solarize(image, int(params.solarise[view, row]))
    return TF.hflip(image) if params.flip[view, row] else image


class _Batches(Dataset[tuple[Tensor, ...] | DataError]):
    """One item is a batch, or the error that stopped it.

    A batch is one tensor for each side, in the order of ``AugmentConfig.by_side``: (V * N, 3, S, S)
    float32, the views one after the other. An error travels as a value: raised in a worker it would
    arrive wrapped in that worker's traceback.
    """

    def __init__(self, store: Store, augment: AugmentConfig, seed: int) -> None:
        self.store, self.augment, self.seed = store, augment, seed

    def __getitem__(self, task: tuple[int, NDArray[np.int64]]) -> tuple[Tensor, ...] | DataError:
        epoch, indices = task
        try:
            images = [self.store.decode(i) for i in indices.tolist()]
        except DataError as error:
            return error
        size = np.array([(image.height, image.width) for image in images])
        params = draw_views(self.augment, seed=self.seed, epoch=epoch, index=indices, size=size)

        def view(number: int, row: int) -> Tensor:
            view = TF.to_tensor(apply_view(images[row], params, number, row, self.augment))
            view = TF.normalize(view, list(self.augment.mean), list(self.augment.std))
            assert isinstance(view, Tensor)
            return view

        return tuple(
            torch.stack([view(number, row) for number in numbers for row in range(len(images))])
            for numbers in self.augment.by_side.values()
        )


class _Tasks:
    """The sampler: what the workers shall make in the epoch that is set."""

    def __init__(self, order: Order) -> None:
        self.order, self.epoch, self.skip = order, 0, 0

    def __len__(self) -> int:
        return self.order.steps - self.skip

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for step in range(self.skip, self.order.steps):
            yield self.epoch, self.order.indices(self.epoch, step)


class TorchvisionLoader:
    """Batches by PIL in worker processes; see ``fastsiam.views.batch.Loader``."""

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._order, self._augment, self._device, self._dtype = order, augment, device, dtype
        self._finisher = Finisher(store, augment, device=device, dtype=dtype)
        self._tasks, self._turn = _Tasks(order), 0
        self._loader = in_workers(
            _Batches(store, augment, order.seed),
            self._tasks,
            workers=workers,
            device=device,
            persistent=True,
        )
        closes_at_exit(self)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        self._tasks.epoch, self._tasks.skip = number, skip
        self._turn += 1
        turn = self._turn
        for step, item in enumerate(self._loader, start=skip):
            if turn != self._turn:
                raise RuntimeError("another epoch of this loader was begun; it makes one at a time")
            if isinstance(item, DataError):
                raise item
            with span("copy"):
                sides = [own.to(self._device, non_blocking=True).to(self._dtype) for own in item]
            views = tuple(
                view.contiguous(memory_format=torch.channels_last)
                for view in in_views_order(sides, self._augment)
            )
            yield self._finisher.batch(self._order.indices(number, step), views)

    def close(self) -> None:
        """End the worker processes."""
        shut_down(self._loader)


def central_crops(
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield batches of central crops by PIL; see ``fastsiam.pipelines.central.MakeCrops``.

    Args:
        store: the images.
        batches: the images of each.
        resize: shorter side before the crop is taken.
        side: of the crops.
        workers: processes; -1 is one for each core of this rank.
        device: where the crops will go; they lie in memory from which a GPU can copy them.
    """
    loader = in_workers(
        _CentralCrops(store, resize, side), batches, workers=workers, device=device, persistent=True
    )
    end = partial(shut_down, loader)
    atexit.register(end)  # before multiprocessing waits for the workers of a pass that was left
    try:
        for item in loader:
            if isinstance(item, DataError):
                raise item
            yield item
    finally:
        end()
        atexit.unregister(end)


class _CentralCrops(Dataset[Tensor | DataError]):
    """One item is a batch of crops (N, S, S, 3) uint8, or the error that stopped it."""

    def __init__(self, store: Store, resize: int, side: int) -> None:
        self.store, self.resize, self.side = store, resize, side

    def __getitem__(self, indices: NDArray[np.int64]) -> Tensor | DataError:
        try:
            return torch.from_numpy(np.stack([self._crop(i) for i in indices.tolist()]))
        except DataError as error:
            return error

    def _crop(self, index: int) -> NDArray[np.uint8]:
        image = TF.resize(self.store.decode(index), [self.resize], InterpolationMode.BILINEAR)
        return np.asarray(TF.center_crop(image, [self.side, self.side]))
