"""The torchvision pipeline: PIL and torchvision's functional operations in DataLoader workers.

It is the baseline and the reference of all other pipelines. It differs from common training scripts
only in that ``draw_views`` draws the parameters. It shares just the normalisation with the other
pipelines, which tests compare with torchvision's. Workers return uint8, which is normalised on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import islice, tee, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.errors import FastSiamError
from fastsiam.trace import span
from fastsiam.views.batch import Shape, crop_shapes
from fastsiam.views.draws import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    NO_LEVEL,
    SATURATION,
    ViewParams,
    draw_views,
)
from fastsiam.views.photometric import normalized
from fastsiam.views.photometric.operations import in_views_order

from .loader_processes import LoaderProcesses, images_of_an_item
from .loaders import Augmented, StoreLoader, copy_stream, take_over
from .order import Order
from .store import Store
from .workers import count

_JITTER = {
    BRIGHTNESS: TF.adjust_brightness,
    CONTRAST: TF.adjust_contrast,
    SATURATION: TF.adjust_saturation,
    HUE: TF.adjust_hue,
}

_PIXELS_AT_ONCE = 2**25
"""A worker makes views as soon as its decoded images have this many pixels: 128 MiB."""


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


class _Task(NamedTuple):
    """A part of a batch that a worker makes."""

    epoch: int
    images: NDArray[np.int64]
    drawn_for: NDArray[np.int64]
    """By which images the parameters are drawn."""


class _Views(Dataset[Augmented | FastSiamError]):
    """Makes the views of a task; an item's key is the task and the worker's next one, if any.

    They are uint8 in the layout of crops: normalised they would take four times the shared memory.
    """

    def __init__(self, store: Store, augment: AugmentConfig, seed: int) -> None:
        self.store, self.augment, self.seed = store, augment, seed

    def __getitem__(self, tasks: tuple[_Task, _Task | None]) -> Augmented | FastSiamError:
        try:
            for task in filter(None, tasks):
                self.store.ahead(task.images.tolist())
            made = self._made(tasks[0])
            self.store.check()
        except FastSiamError as error:
            return error
        return made

    def _made(self, task: _Task) -> Augmented:
        crops = tuple(
            torch.empty(shape, dtype=torch.uint8)
            for shape in crop_shapes(self.augment, len(task.images))
        )
        first, drawn = 0, list[ViewParams]()
        for images in _few(self.store, task.images):
            rows = slice(first, first + len(images))
            params = draw_views(
                self.augment,
                seed=self.seed,
                epoch=task.epoch,
                index=task.drawn_for[rows],
                size=np.array([(image.height, image.width) for image in images]),
            )
            for own, numbers in zip(crops, self.augment.by_side.values(), strict=True):
                for number, view in zip(numbers, own[:, rows].numpy(), strict=True):
                    for row, image in enumerate(images):
                        view[row] = apply_view(image, params, number, row, self.augment)
            first = rows.stop
            drawn.append(params)
        return task.images, ViewParams.joined(drawn), crops


def _few(store: Store, indices: NDArray[np.int64]) -> Iterator[list[Image.Image]]:
    """Decode images and yield them in lists of about ``_PIXELS_AT_ONCE`` pixels.

    Each list is emptied before the next image is decoded.
    """
    images: list[Image.Image] = []
    pixels = 0
    for index in indices.tolist():
        images.append(store.decode(index))
        pixels += images[-1].width * images[-1].height
        if pixels >= _PIXELS_AT_ONCE:
            yield images
            images.clear()
            pixels = 0
    if images:
        yield images


class _Tasks:
    """The sampler: pairs of a task of the current epoch and the next task of the same worker.

    Args:
        order: which images make up which batch.
        images: most images of a task.
        workers: number of workers, which get the tasks in turn.
    """

    def __init__(self, order: Order, images: int, workers: int) -> None:
        self.order, self.images, self.workers = order, images, max(1, workers)
        self.epoch, self.skip = 0, 0

    def __iter__(self) -> Iterator[tuple[_Task, _Task | None]]:
        tasks, later = tee(self._of_the_epoch())
        return zip_longest(tasks, islice(later, self.workers, None))

    def _of_the_epoch(self) -> Iterator[_Task]:
        for step in range(self.skip, self.order.steps):
            shown = cut(self.order.indices(self.epoch, step), self.images)
            drawn_for = cut(self.order.drawn_for(self.epoch, step), self.images)
            for part, own in zip(shown, drawn_for, strict=True):
                yield _Task(self.epoch, part, own)


def cut(batch: NDArray[np.int64], images: int) -> list[NDArray[np.int64]]:
    """Split a batch into parts of about equal size, with at most ``images`` images each."""
    return np.array_split(batch, math.ceil(len(batch) / images))


def put_together(
    parts: Iterator[Augmented],
    shapes: Sequence[Shape],
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> Augmented:
    """Wait for the parts of the next batch, and copy them to a device.

    Args:
        parts: parts of batches, in order.
        shapes: shape (V, N, S, S, 3) of the batch's crops, for each side.
        device: device of the batch.
        stream: stream that copies to a GPU; None on a CPU.
    """
    with torch.cuda.stream(stream):
        whole = tuple(torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes)
    done, shown, drawn = 0, list[NDArray[np.int64]](), list[ViewParams]()
    while done < shapes[0][1]:
        images, params, crops = next(parts)
        shown.append(images)
        drawn.append(params)
        rows = slice(done, done + len(images))
        with span("copy"), torch.cuda.stream(stream):
            for own, made in zip(whole, crops, strict=True):
                for view, of_part in zip(own, made, strict=True):  # as one block each
                    view[rows].copy_(of_part, non_blocking=True)
        done = rows.stop
    take_over(whole, None if stream is None else stream.record_event())
    return np.concatenate(shown), ViewParams.joined(drawn), whole


class TorchvisionLoader(StoreLoader):
    """The loader of the torchvision pipeline; see ``fastsiam.views.batch.Loader``."""

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int | str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(store, order, augment, device=device, dtype=dtype)
        self._stream, processes = copy_stream(device), count(workers)
        self._tasks = _Tasks(order, images_of_an_item(self._shapes, workers=processes), processes)
        views = _Views(store, augment, order.seed)
        self._processes = LoaderProcesses(
            views, self._tasks, workers=processes, device=device, forks=not store.is_remote
        )

    def close(self) -> None:
        """End the worker processes."""
        super().close()
        self._processes.close()

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        self._tasks.epoch, self._tasks.skip = epoch, skip
        parts = iter(self._processes)
        for _ in range(skip, self.steps):
            index, params, crops = put_together(parts, self._shapes, self._device, self._stream)
            made = in_views_order([own.flatten(0, 1) for own in crops], self._augment)
            views = (normalized(view, self._augment, dtype=self._dtype) for view in made)
            yield index, params, tuple(views)
