"""The baseline: PIL images and torchvision's functional operations in DataLoader workers.

This is what users have today, with the drawn parameters in the place of torchvision's own draws. It
is the reference of every other pipeline, so it shares no augmentation code with them; only the
normalisation is theirs, which tests hold to torchvision's, and which runs where the model does:
what the workers hand over is uint8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.trace import span
from fastsiam.views.batch import Batch, Crops, Shape, crop_shapes
from fastsiam.views.digest import added, seen_in
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

from .copies import copy_stream, take_over
from .finish import Finisher
from .order import Order
from .shared_memory import cut, images_of_an_item
from .store import Store
from .workers import closes_at_exit, count, in_workers

_JITTER = {
    BRIGHTNESS: TF.adjust_brightness,
    CONTRAST: TF.adjust_contrast,
    SATURATION: TF.adjust_saturation,
    HUE: TF.adjust_hue,
}

_PIXELS_AT_ONCE = 2**25
"""A worker makes the views of its decoded images when they have so many pixels: 128 MiB."""


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
    """What a worker shall make: a part of a batch."""

    epoch: int
    place: int
    """Of its first image in the epoch."""
    images: NDArray[np.int64]
    drawn_for: NDArray[np.int64]
    """By which images the parameters are drawn."""


class _Made(NamedTuple):
    """What a worker made, or what its parts are together."""

    crops: Crops
    seen: int = 0
    """Digest of their images and draws."""


class _Views(Dataset[_Made | DataError]):
    """One item is a part of a batch: its views before the normalisation, or an error.

    The views lie as crops do (``fastsiam.views.batch.Crops``), uint8: normalised, they would take
    four times the memory on their way. An error travels as a value: raised in a worker it would
    arrive wrapped in that worker's traceback.
    """

    def __init__(self, store: Store, augment: AugmentConfig, seed: int) -> None:
        self.store, self.augment, self.seed = store, augment, seed

    def __getitem__(self, task: _Task) -> _Made | DataError:
        epoch, place, indices, drawn_for = task
        made = tuple(
            torch.empty(shape, dtype=torch.uint8)
            for shape in crop_shapes(self.augment, len(indices))
        )
        first, seen = 0, 0
        try:
            for images in _few(self.store, indices):
                rows = slice(first, first + len(images))
                params = draw_views(
                    self.augment,
                    seed=self.seed,
                    epoch=epoch,
                    index=drawn_for[rows],
                    size=np.array([(image.height, image.width) for image in images]),
                )
                self._write(images, params, tuple(own[:, rows] for own in made))
                own = seen_in(params, indices[rows], epoch=epoch, place=place + first)
                first, seen = rows.stop, added(seen, own)
        except DataError as error:
            return error
        return _Made(made, seen)

    def _write(self, images: Sequence[Image.Image], params: ViewParams, made: Crops) -> None:
        for own, numbers in zip(made, self.augment.by_side.values(), strict=True):
            for number, view in zip(numbers, own.numpy(), strict=True):
                for row, image in enumerate(images):
                    view[row] = apply_view(image, params, number, row, self.augment)


def _few(store: Store, indices: NDArray[np.int64]) -> Iterator[list[Image.Image]]:
    """Decode images and yield them a few at a time: until they have ``_PIXELS_AT_ONCE``.

    What was yielded is emptied before more is decoded.
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
    """The sampler: what the workers shall make in the epoch that is set."""

    def __init__(self, order: Order, images: int) -> None:
        self.order, self.images, self.epoch, self.skip = order, images, 0, 0

    def __len__(self) -> int:
        parts = math.ceil(self.order.batch // self.order.world / self.images)
        return (self.order.steps - self.skip) * parts

    def __iter__(self) -> Iterator[_Task]:
        for step in range(self.skip, self.order.steps):
            place = self.order.place(step)
            shown = cut(self.order.indices(self.epoch, step), self.images)
            drawn_for = cut(self.order.drawn_for(self.epoch, step), self.images)
            for part, own in zip(shown, drawn_for, strict=True):
                yield _Task(self.epoch, place, part, own)
                place += len(part)


class _Whole:
    """Puts the parts of batches together on the device.

    Args:
        device: where the batches shall lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, copy_stream(device)

    def next(self, items: Iterator[_Made | DataError], shapes: Sequence[Shape]) -> _Made:
        """Wait for as many items as make up a batch, whose crops have the given shapes.

        Raises:
            DataError: an item is one.
        """
        with torch.cuda.stream(self._stream):
            whole = tuple(
                torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in shapes
            )
        done, images, seen = 0, shapes[0][1], 0
        while done < images:
            item = next(items)
            if isinstance(item, DataError):
                raise item
            part, seen = item.crops, added(seen, item.seen)
            rows = slice(done, done + part[0].shape[1])
            with span("copy"), torch.cuda.stream(self._stream):
                for own, made in zip(whole, part, strict=True):
                    for view, of_part in zip(own, made, strict=True):  # as one block each
                        view[rows].copy_(of_part, non_blocking=True)
            done = rows.stop
        take_over(whole, None if self._stream is None else self._stream.record_event())
        return _Made(whole, seen)


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
        self._order, self._augment, self._dtype = order, augment, dtype
        self._finisher = Finisher(store, order, augment, device=device, dtype=dtype)
        self._whole, self._turn = _Whole(device), 0
        self._shapes = crop_shapes(augment, order.batch // order.world)
        self._tasks = _Tasks(order, images_of_an_item(self._shapes, workers=count(workers)))
        self._loader = in_workers(
            _Views(store, augment, order.seed),
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
        turn, items = self._turn, iter(self._loader)
        for step in range(skip, self.steps):
            crops, seen = self._whole.next(items, self._shapes)
            views = in_views_order([own.flatten(0, 1) for own in crops], self._augment)
            yield self._finisher.batch(
                self._order.indices(number, step),
                tuple(normalized(view, self._augment, dtype=self._dtype) for view in views),
                seen,
            )
            if turn != self._turn:
                raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def close(self) -> None:
        """End the worker processes."""
        self._loader.shut_down()
