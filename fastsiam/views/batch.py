"""Batches, and the interfaces of loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a batch: one or more views of N images, on the training device."""

    views: tuple[Tensor, ...]
    """View v is (N, 3, S_v, S_v) float, normalised, channels-last."""
    index: Tensor
    """(N,) int64 positions in the data set."""
    label: Tensor
    """(N,) int64, -1 for images without a label. Methods do not use it."""
    seen: int = 0
    """Digest of images and augmentations (``fastsiam.views.digest``); 0 if the loader has none."""
    params: ViewParams | None = None
    """The views' crop boxes, flips and colour parameters, on the host; None for noise."""
    name_of: Callable[[int], str] = field(default=lambda index: "", repr=False, compare=False)
    """Function that returns an image's name, given its position in the data set."""

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

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on a device; Lightning calls this."""
        views = (view.to(device, non_blocking=non_blocking) for view in self.views)
        index = self.index.to(device, non_blocking=non_blocking)
        label = self.label.to(device, non_blocking=non_blocking)
        return replace(self, views=tuple(views), index=index, label=label)

    def chunks(self, count: int) -> list[Batch]:
        """Split into equal parts for gradient accumulation, without digest and params."""
        parts = (t.chunk(count) for t in (self.index, self.label, *self.views))
        return [
            Batch(tuple(views), index, label, name_of=self.name_of)
            for index, label, *views in zip(*parts, strict=True)
        ]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a device; does not wait for the device.

    NumPy writes into the pinned memory: torch's own copy would wake a thread on every core, which
    takes longer than the copy and disturbs the threads that decode.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(array))
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


Crops = tuple[Tensor, ...]
"""Crops of N images, before the photometric stage: one tensor for each side of the views, in the
order of ``AugmentConfig.by_side``. Each is (V, N, S, S, 3) uint8 on the device, where V counts the
views of that side."""

Shape = tuple[int, int, int, int, int]
"""(V, N, S, S, 3) of the crops of one side."""


def crop_shapes(config: AugmentConfig, images: int) -> list[Shape]:
    """Return the shapes of the ``Crops`` of a number of images."""
    return [(len(views), images, side, side, 3) for side, views in config.by_side.items()]


class Loader(Protocol):
    """Interface of loaders: one rank's batches of a data set. The whole state is (epoch, step)."""

    @property
    def pipeline(self) -> str:
        """Name of the pipeline that loads."""

    @property
    def source(self) -> str:
        """Description of the data, for messages."""

    @property
    def images(self) -> int:
        """Number of images in the data set or its chosen subset."""

    @property
    def steps(self) -> int:
        """Number of complete global batches in an epoch, the same on all ranks."""

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield an epoch's batches from step ``skip`` on; they depend on the arguments only."""

    def close(self) -> None:
        """End worker processes and free memory; the loader cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """N images without augmentation, for evaluation."""

    image: Tensor
    """(N, 3, S, S) float central crops, normalised, channels-last, on the device."""
    label: Tensor
    """(N,) int64 on the device, -1 for images without a label."""
    index: Tensor
    """(N,) int64 positions in the data set, on the device."""


class EvalLoader(Protocol):
    """Interface of loaders for evaluation: central crops of one rank's images, in order."""

    @property
    def images(self) -> int:
        """Number of images of all ranks."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(``images``,) labels of all ranks' images, -1 for images without a label."""

    def names(self) -> list[str]:
        """Return the names of all ranks' images, in the data set's order."""

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
