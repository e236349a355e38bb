"""Batches of annotated images: which, how large, flipped or not, by seed and step alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fastsiam.errors import DataError
from fastsiam.pipelines.store.decode import decode

from .dataset import DetectionSet, Picture
from .masks import pixels

Target = dict[str, Tensor]
Sample = tuple[Tensor, Target]
"""An image (3, H, W) of 0 to 1, and its objects: "boxes" (n, 4), "labels" (n,) from 1, and
perhaps "masks" (n, H, W) of 0 and 1."""

_AHEAD = 3
"""Steps that are loaded before they are asked for."""


class Draw(NamedTuple):
    """What is drawn for one image of one step."""

    image: int
    """Position among the images trained on."""
    side: int
    """Its shorter side, in pixels."""
    flip: bool


def draw_position(seed: int, position: int, images: int, sides: Sequence[int]) -> Draw:
    """Return what is drawn for a position in the endless row of images.

    Each pass over the images has an order of its own.

    Args:
        seed: of all that is drawn.
        position: step x batch + place in the batch.
        images: how many there are.
        sides: that one is drawn of.
    """
    image = int(_order(seed, position // images, images)[position % images])
    generator = np.random.default_rng([seed, 1, position])
    side = sides[int(generator.integers(len(sides)))]
    return Draw(image=image, side=side, flip=bool(generator.random() < 0.5))


@lru_cache(4)  # batches overlap two passes, and trials two seeds
def _order(seed: int, epoch: int, images: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, 0, epoch]).permutation(images)


def open_image(dataset: DetectionSet, index: int) -> Image.Image:
    """Decode an image: RGB.

    Raises:
        DataError: it cannot be decoded or has another size than its annotation says.
    """
    picture = dataset.picture(index)
    content = dataset.read(index)
    try:
        image = decode(content)
    except ValueError as error:
        raise DataError(f"{dataset.name}: {picture.file} cannot be decoded ({error})") from error
    if image.size != (picture.width, picture.height):
        raise DataError(
            f"{dataset.name}: {picture.file} is {image.width} x {image.height} pixels, but its "
            f"annotation says {picture.width} x {picture.height}"
        )
    return image


def resize(image: Image.Image, side: int, longest: int) -> Image.Image:
    """Resize an image to a shorter side, or less where its longer side would be above a limit."""
    scale = min(side / min(image.size), longest / max(image.size))
    width, height = (max(1, int(pixel * scale + 0.5)) for pixel in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def as_tensor(image: Image.Image) -> Tensor:
    """Return an image as (3, H, W), float32 of 0 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255


def objects_of(picture: Picture, height: int, width: int, *, flip: bool, masks: bool) -> Target:
    """Return a picture's objects, crowds left out, in an image of another size."""
    kept = np.flatnonzero(~picture.crowd)
    scale = np.array([width / picture.width, height / picture.height] * 2, np.float32)
    limit = np.array([width, height] * 2, np.float32)
    boxes = (picture.boxes[kept] * scale).clip(0, limit)
    if flip:
        boxes = np.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    full = (boxes[:, 2:] > boxes[:, :2]).all(1)
    kept, boxes = kept[full], boxes[full]
    target = {
        "boxes": torch.from_numpy(np.ascontiguousarray(boxes)),
        "labels": torch.from_numpy(picture.labels[kept] + 1),
    }
    if masks:
        assert picture.masks is not None
        resized = torch.zeros(len(kept), height, width, dtype=torch.uint8)
        for place, index in enumerate(kept):
            mask = Image.fromarray(pixels(picture.masks[index], picture.height, picture.width))
            mask = mask.resize((width, height), Image.Resampling.NEAREST)
            resized[place] = torch.from_numpy(np.array(mask, np.uint8))
        target["masks"] = resized.flip(-1) if flip else resized
    return target


class TrainingImages:
    """The batches of a training run, from any step on; this rank's share of each.

    Images without objects (crowds do not count) are left out, as in detectron2.

    Args:
        dataset: what is trained on.
        seed: of order, sizes and flips.
        batch: of all ranks.
        sides: shorter sides that are drawn of.
        longest: most pixels of the longer side.
        masks: whether targets have masks.
        rank: of this process.
        world: how many ranks there are.
        workers: threads that load.

    Raises:
        DataError: no image has an object.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        *,
        seed: int,
        batch: int,
        sides: Sequence[int],
        longest: int,
        masks: bool,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
    ) -> None:
        self._dataset, self._seed, self._batch, self._sides = dataset, seed, batch, sides
        self._longest, self._masks, self._workers = longest, masks, max(1, workers)
        share = batch // world
        self._own = range(rank * share, (rank + 1) * share)
        self.used = [
            index for index in range(len(dataset)) if not dataset.picture(index).crowd.all()
        ]
        """Positions of the images that are trained on."""
        if not self.used:
            raise DataError(f"{dataset.name} has no image with an object to train on")

    def from_step(self, first: int, steps: int) -> Iterator[list[Sample]]:
        """Yield the batches of steps ``first`` to ``steps``, the last one left out."""
        pending: deque[list[Future[Sample]]] = deque()
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                for step in range(first, steps):
                    for ahead in range(step + len(pending), min(steps, step + _AHEAD)):
                        positions = [ahead * self._batch + place for place in self._own]
                        pending.append([pool.submit(self.sample, at) for at in positions])
                    yield [future.result() for future in pending.popleft()]
            finally:
                pool.shutdown(cancel_futures=True)

    def sample(self, position: int) -> Sample:
        """Return the image at a position in the endless row of images, and its objects."""
        draw = draw_position(self._seed, position, len(self.used), self._sides)
        index = self.used[draw.image]
        image = resize(open_image(self._dataset, index), draw.side, self._longest)
        if draw.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        target = objects_of(
            self._dataset.picture(index),
            image.height,
            image.width,
            flip=draw.flip,
            masks=self._masks,
        )
        return as_tensor(image), target
