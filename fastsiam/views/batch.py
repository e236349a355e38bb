"""What a loader hands to a training loop, and what a loader is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a batch: N images, one or more views of each, on the training device."""

    views: tuple[Tensor, ...]
    """View v: (N, 3, S_v, S_v) float, normalised, channels-last: ready for the model."""
    index: Tensor
    """(N,) int64: positions in the data set."""
    label: Tensor
    """(N,) int64, -1 where the data has none. No method sees it."""
    seen: int = 0
    """Digest of its images and draws (``fastsiam.views.digest``); 0 if the loader makes none."""
    params: ViewParams | None = None
    """The views' crop boxes, flips and colour parameters, on the host; None for noise."""
    name_of: Callable[[int], str] = field(default=lambda index: "", repr=False, compare=False)
    """Returns an image's name by its position in the data set."""

    @property
    def view1(self) -> Tensor:
        """The first view of each image."""
        return self.views[0]

    @property
    def view2(self) -> Tensor:
        """The second view of the same images."""
        return self.views[1]

    @property
    def names(self) -> list[str]:
        """The N images' names within the data set, such as ``class/file.jpg``; "" for noise."""
        return [self.name_of(index) for index in self.index.tolist()]

    def chunks(self, count: int) -> list[Batch]:
        """Cut into equal parts, for gradient accumulation; parts have no digest and no params."""
        parts = (t.chunk(count) for t in (self.index, self.label, *self.views))
        return [
            Batch(tuple(views), index, label, name_of=self.name_of)
            for index, label, *views in zip(*parts, strict=True)
        ]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a device without making the host wait for the device."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


Crops = tuple[Tensor, ...]
"""Crops of N images, before the photometric stage: one tensor for each side of the views, in the
order of ``AugmentConfig.by_side``. Each is (V, N, S, S, 3) uint8 on the device, where V counts the
views of that side."""

Shape = tuple[int, int, int, int, int]
"""(V, N, S, S, 3) of the crops of one side."""


def crop_shapes(config: AugmentConfig, images: int) -> list[Shape]:
    """Return the shapes of the ``Crops`` of so many images."""
    return [(len(views), images, side, side, 3) for side, views in config.by_side.items()]


class Loader(Protocol):
    """A pipeline over one data set, for one rank. Its whole state is (epoch, step)."""

    @property
    def source(self) -> str:
        """Where the images come from, for people."""

    @property
    def images(self) -> int:
        """Images in the data set, or those of it that are chosen."""

    @property
    def steps(self) -> int:
        """Batches in an epoch: whole global batches, the tail is dropped. Equal on all ranks."""

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield an epoch's batches from step ``skip`` on: a function of its arguments alone."""

    def close(self) -> None:
        """End worker processes and free memory; the loader cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """N images without augmentation, for evaluation."""

    image: Tensor
    """(N, 3, S, S) float, normalised, channels-last: central crops on the device."""
    label: Tensor
    """(N,) int64 on the device, -1 where the data has none."""
    index: Tensor
    """(N,) int64 on the device: positions in the data set."""


class EvalLoader(Protocol):
    """Central crops of one rank's share of a data set, in the data set's order, each image once."""

    @property
    def images(self) -> int:
        """Images in the data set, or those of it that are chosen, over all ranks."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(``images``,) labels of all ranks' images, -1 where the data has none."""

    def names(self) -> list[str]:
        """Return the names of all ranks' images within the data set, in order."""

    def rows(self) -> Iterator[int]:
        """Yield which images this rank shows: positions among ``names``, ascending.

        Take as many after each batch as it has images: a bad image may be left out, which is known
        when its batch is there.
        """

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
