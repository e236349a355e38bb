"""The torchvision pipeline: PIL and torchvision's functional operations in DataLoader workers.

It is the baseline and the reference for all other pipelines. It differs from common training
scripts only in that ``draw_views`` draws the parameters. It shares only the normalisation with the
other pipelines, and tests compare that with torchvision's. Workers return uint8, which is
normalised on the device.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.errors import FastSiamError
from fastsiam.trace import span
from fastsiam.views.batch import crop_shapes
from fastsiam.views.draws import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    NO_LEVEL,
    SATURATION,
    ViewParams,
    draw_views,
)
from fastsiam.views.photometric import normalize
from fastsiam.views.photometric.operations import split_by_view

from .loaders import Augmented, LoaderSpec, StoreLoader, current_gpu
from .order import Order
from .store import Store
from .workers import count, dead_worker, server_context, set_up_worker

_JITTER = {
    BRIGHTNESS: TF.adjust_brightness,
    CONTRAST: TF.adjust_contrast,
    SATURATION: TF.adjust_saturation,
    HUE: TF.adjust_hue,
}

_IMAGES_AT_ONCE = 4
"""Number of decoded images that a worker keeps in memory at a time."""


def apply_view(
    image: Image.Image, params: ViewParams, view: int, row: int, config: AugmentConfig
) -> Image.Image:
    """Make one view of one RGB image, with torchvision's operations in the paper's order.

    Returns:
        The RGB view before normalisation, side x side pixels.
    """
    top, left, height, width = params.box[view, row].tolist()
    view_config = config.views[view]
    side = [view_config.crop, view_config.crop]
    with span("crop"):
        image = TF.resized_crop(image, top, left, height, width, side, InterpolationMode.BILINEAR)
    with span("photometric"):
        if params.jitter[view, row]:
            for op in params.order[view, row].tolist():
                if op == HUE and view_config.hue == 0:
                    continue
                image = _JITTER[op](image, float(params.factor[view, row, op]))
        if params.gray[view, row]:
            image = TF.rgb_to_grayscale(image, num_output_channels=3)
        if params.blur[view, row]:
            image = image.filter(ImageFilter.GaussianBlur(float(params.blur[view, row])))
        if params.solarise[view, row] != NO_LEVEL:
            image = TF.solarize(image, int(params.solarise[view, row]))
    return TF.hflip(image) if params.flip[view, row] else image


_Task = tuple[int, NDArray[np.int64], NDArray[np.int64]]
"""Epoch and images of a batch, and the numbers from ``Order.draw_numbers``."""


class _Views(Dataset[Augmented | FastSiamError]):
    """Dataset of batches: their views before normalisation, as uint8 in the layout of crops.

    Normalised views would take four times the shared memory. Errors are returned instead of raised,
    because the DataLoader would wrap them in a traceback.
    """

    def __init__(self, store: Store, augment: AugmentConfig, seed: int) -> None:
        self._store, self._augment, self._seed = store, augment, seed

    def __getitem__(self, task: _Task) -> Augmented | FastSiamError:
        try:
            batch = self._make_batch(*task)
            self._store.check()
        except FastSiamError as error:
            return error
        return batch

    def _make_batch(
        self, epoch: int, index: NDArray[np.int64], draw_numbers: NDArray[np.int64]
    ) -> Augmented:
        shapes = crop_shapes(self._augment, len(index))
        crops = tuple(torch.empty(shape, dtype=torch.uint8, device="cpu") for shape in shapes)
        self._store.prefetch(index.tolist())
        params_parts = []
        for first in range(0, len(index), _IMAGES_AT_ONCE):
            rows = slice(first, first + _IMAGES_AT_ONCE)
            images = [self._store.decode(i) for i in index[rows].tolist()]
            size = np.array([(image.height, image.width) for image in images])
            params = draw_views(
                self._augment, seed=self._seed, epoch=epoch, index=draw_numbers[rows], size=size
            )
            for side_crops, numbers in zip(crops, self._augment.by_side.values(), strict=True):
                for number, view in zip(numbers, side_crops[:, rows].numpy(), strict=True):
                    for row, image in enumerate(images):
                        view[row] = apply_view(image, params, number, row, self._augment)
            params_parts.append(params)
        return index, ViewParams.concatenate(params_parts), crops


class _Tasks:
    """Sampler of the tasks of the current epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.epoch, self.skip = 0, 0

    def __iter__(self) -> Iterator[_Task]:
        order, epoch = self._order, self.epoch
        for step in range(self.skip, order.steps):
            yield epoch, order.indices(epoch, step), order.draw_numbers(epoch, step)


class TorchvisionLoader(StoreLoader):
    """The loader of the torchvision pipeline; see ``fastsiam.views.batch.Loader``."""

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        store, order = self._store, self._order
        self._tasks, processes = _Tasks(order), count(spec.data.workers)
        self.survives_fork = not processes
        context: Any = None
        if processes:  # Python 3.14 would use a server for local files, too
            context = server_context(__name__) if store.is_remote else "fork"
        self._loader: DataLoader[Any] = DataLoader(
            _Views(store, self._augment, order.seed),
            batch_size=None,
            sampler=self._tasks,
            num_workers=processes,
            collate_fn=_unchanged,
            pin_memory=self._device.type == "cuda",
            persistent_workers=processes > 0,
            worker_init_fn=partial(set_up_worker, dict(os.environ)),
            multiprocessing_context=context,
        )

    def close(self) -> None:
        """End the worker processes."""
        super().close()
        self._end_workers()

    def _end_workers(self) -> None:
        """End the worker processes; the next epoch starts new ones."""
        if (running := getattr(self._loader, "_iterator", None)) is not None:
            running._shutdown_workers()
            self._loader._iterator = None

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        self._tasks.epoch, self._tasks.skip = epoch, skip
        for index, params, crops in self._items():
            device_crops = [
                side_crops.to(self._device, non_blocking=True).flatten(0, 1) for side_crops in crops
            ]
            uint8_views = split_by_view(device_crops, self._augment)
            views = (normalize(view, self._augment, dtype=self._dtype) for view in uint8_views)
            yield index, params, tuple(views)

    def _items(self) -> Iterator[Augmented]:
        """Yield the batches of the workers.

        Raises:
            WorkerError: a worker was killed.
        """
        try:
            handler = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL  # None if set by C code
            with current_gpu(self._device):  # the GPU on which torch's thread pins memory
                items = iter(self._loader)
            if threading.current_thread() is threading.main_thread():
                # Torch's handler could raise anywhere, such as in an optimizer step.
                signal.signal(signal.SIGCHLD, handler)
            for item in items:
                if isinstance(item, FastSiamError):
                    raise item
                yield item
        except KeyboardInterrupt:  # a notebook may continue, but torch's iterator cannot
            self._end_workers()
            raise
        except (RuntimeError, OSError, EOFError) as error:
            worker_died = not isinstance(error, RuntimeError) or "exited unexpectedly" in str(error)
            if not (self._loader.num_workers and worker_died):
                raise
            self._end_workers()  # torch would wait for the dead one in the next epoch
            raise dead_worker(error) from error


def _unchanged(item: Any) -> Any:
    return item
