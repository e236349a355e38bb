"""Training batches of annotated images: order, sizes and flips depend on seed and step only."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F
from torchvision.tv_tensors import BoundingBoxes

from fastsiam.config.detect import DetectConfig
from fastsiam.distributed import Place
from fastsiam.errors import DataError, FastSiamError
from fastsiam.pipelines.workers import count, prefetch_map

from .datasets import DetectionSet
from .protocol import schedule_of

Sample = tuple[Tensor, dict[str, Tensor]]
"""An image (3, H, W) from 0 to 1, and its objects: "boxes" (n, 4), "labels" (n,) from 1, and for
COCO "masks" (n, H, W) of 0 and 1."""

_AHEAD = 2
"""Number of steps that are prefetched."""


class Draw(NamedTuple):
    """Random choices for one image of one step."""

    image: int
    """Position among the images to train on."""
    side: int
    """Shorter side to resize the image to, in pixels."""
    flip: bool


def draw_position(seed: int, position: int, images: int, sides: Sequence[int]) -> Draw:
    """Draw the image, its size and its flip for a position in the endless sequence of images.

    The sequence repeats the images, reshuffled in each pass. The image at index i of a batch has
    the position step x batch size + i.
    """
    image = int(_order(seed, position // images, images)[position % images])
    generator = np.random.default_rng([seed, 1, position])
    side = sides[int(generator.integers(len(sides)))]
    return Draw(image=image, side=side, flip=bool(generator.random() < 0.5))


@lru_cache(4)  # a batch may overlap two passes, and trials two seeds
def _order(seed: int, epoch: int, images: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, 0, epoch]).permutation(images)


def resize(image: Image.Image, side: int, longest: int) -> Tensor:
    """Resize an image to (3, H, W) float32 from 0 to 1, with sides rounded as in detectron2.

    Args:
        image: RGB.
        side: shorter side in pixels; reduced if the longer side would exceed ``longest``.
        longest: largest longer side, in pixels.
    """
    scale = min(side / min(image.size), longest / max(image.size))
    width, height = (max(1, int(pixel * scale + 0.5)) for pixel in image.size)
    pixels: Tensor = F.pil_to_tensor(F.resize(image, [height, width]))
    return pixels.float() / 255


class DetectionBatches:
    """This rank's share of the batches of a training run, from any step on.

    Images without objects (crowds do not count) are left out, as in detectron2. Order, sizes and
    flips depend on the seed. Targets have masks if the data set is COCO's.

    Raises:
        FastSiamError: no image has an object, or the batch cannot be divided among the ranks.
    """

    def __init__(
        self, dataset: DetectionSet, config: DetectConfig, *, seed: int, place: Place
    ) -> None:
        self._dataset, self._config, self._seed = dataset, config, seed
        self._sides = schedule_of(config).sides
        share, remainder = divmod(config.batch_size, place.world)
        if remainder:
            raise FastSiamError(
                f"--batch-size {config.batch_size} is not divisible by {place.world} ranks"
            )
        self._batch_indices = range(place.rank * share, (place.rank + 1) * share)
        self.used = [index for index, picture in enumerate(dataset.pictures) if len(picture.labels)]
        """Positions of the images to train on."""
        if not self.used:
            raise DataError(f"{dataset.name} has no images with objects to train on")

    def from_step(self, first: int, steps: int) -> Generator[list[Sample]]:
        """Yield the batches from step ``first`` up to, but not including, step ``steps``."""
        batch, share = self._config.batch_size, self._batch_indices
        positions = (step * batch + index for step in range(first, steps) for index in share)
        ahead, threads = _AHEAD * len(share), max(1, count(self._config.workers))
        with closing(prefetch_map(self.sample, positions, count=ahead, threads=threads)) as samples:
            for _ in range(first, steps):
                yield [*islice(samples, len(share))]

    def sample(self, position: int) -> Sample:
        """Return the augmented image at a position in the endless sequence, and its objects."""
        draw = draw_position(self._seed, position, len(self.used), self._sides)
        index = self.used[draw.image]
        picture, coco = self._dataset.pictures[index], self._dataset.coco
        image = resize(self._dataset.image(index), draw.side, self._config.long_side)
        size, original_size = list(image.shape[1:]), (picture.height, picture.width)
        boxes = BoundingBoxes(
            torch.from_numpy(picture.boxes), format="XYXY", canvas_size=original_size
        )
        parts = {"image": image, "boxes": F.clamp_bounding_boxes(F.resize(boxes, size))}
        if coco is not None:
            masks = np.stack([coco.annToMask(annotation) for annotation in picture.annotations])
            # Not tv_tensors.Mask: torchvision 0.26 resizes it by NEAREST, which gives other pixels.
            nearest = InterpolationMode.NEAREST_EXACT
            parts["masks"] = F.resize_image(torch.from_numpy(masks), size, nearest)
        if draw.flip:
            parts = {name: F.horizontal_flip(part) for name, part in parts.items()}
        image, boxes = parts.pop("image"), parts["boxes"]
        parts["labels"] = torch.from_numpy(picture.labels) + 1
        is_nonempty = (boxes[:, 2:] > boxes[:, :2]).all(1)  # resizing can make boxes empty
        return image, {name: part[is_nonempty] for name, part in parts.items()}
