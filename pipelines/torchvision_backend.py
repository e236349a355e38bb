"""The baseline: PIL images and torchvision's functional operations in DataLoader workers.

This is what users have today, with the drawn parameters in the place of torchvision's own draws. It
is the reference of every other pipeline, so it shares no augmentation code with them.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator

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
from fastsiam.views.batch import TwoViewBatch, to_device
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION, ViewParams, draw_views

from .order import Order
from .store import Store
from .workers import in_workers, shut_down

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
        view: 0 or 1.
        row: the image's place in the batch.
        config: for the side of the view.

    Returns:
        The view before normalisation, RGB, ``config.crop`` pixels square.
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
    return TF.hflip(image) if params.flip[view, row] else image


class _Batches(Dataset[Tensor | DataError]):
    """One item is a batch: (2, N, 3, S, S) float32, or the error that stopped it.

    An error travels as a value: raised in a worker it would arrive wrapped in that worker's
    traceback.
    """

    def __init__(self, store: Store, augment: AugmentConfig, seed: int) -> None:
        self.store, self.augment, self.seed = store, augment, seed

    def __getitem__(self, task: tuple[int, NDArray[np.int64]]) -> Tensor | DataError:
        epoch, indices = task
        try:
            images = [self.store.decode(i) for i in indices.tolist()]
        except DataError as error:
            return error
        size = np.array([(image.height, image.width) for image in images])
        params = draw_views(self.augment, seed=self.seed, epoch=epoch, index=indices, size=size)
        views = [
            TF.normalize(TF.to_tensor(view), list(self.augment.mean), list(self.augment.std))
            for number in range(2)
            for row, image in enumerate(images)
            for view in [apply_view(image, params, number, row, self.augment)]
        ]
        return torch.stack(views).view(2, len(images), *views[0].shape)


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
    """Two-view batches by PIL in worker processes; see ``fastsiam.views.batch.Loader``."""

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
        self._order, self._labels, self._device, self._dtype = order, store.labels, device, dtype
        self._tasks, self._turn = _Tasks(order), 0
        self._loader = in_workers(
            _Batches(store, augment, order.seed),
            self._tasks,
            workers=workers,
            device=device,
            persistent=True,
        )
        atexit.register(_close_at_exit, weakref.ref(self))

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
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
                views = item.to(self._device, non_blocking=True).to(self._dtype)
            index = self._order.indices(number, step)
            yield TwoViewBatch(
                view1=views[0].contiguous(memory_format=torch.channels_last),
                view2=views[1].contiguous(memory_format=torch.channels_last),
                index=to_device(index, self._device),
                label=to_device(self._labels[index], self._device),
            )

    def close(self) -> None:
        """End the worker processes."""
        shut_down(self._loader)


def _close_at_exit(reference: weakref.ref[TorchvisionLoader]) -> None:
    """Close a loader that its user left open, before multiprocessing waits for the workers."""
    loader = reference()
    if loader is not None:
        loader.close()
