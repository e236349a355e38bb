"""Batches of views, and the interfaces of loaders."""

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


def _no_name(index: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch: views of N images, on the training device."""

    views: tuple[Tensor, ...]
    """View v is (N, 3, S_v, S_v) float, normalised, channels-last."""
    index: Tensor
    """(N,) int64 positions in the data set; with a holdout, among its training images."""
    label: Tensor
    """(N,) int64, -1 for images without a label. Methods do not use it."""
    digest: int = 0
    """Digest of images and augmentations (``fastsiam.views.digest``); 0 if not computed."""
    params: ViewParams | None = None
    """Crop boxes, flips and colour parameters of the views, on the host; None for noise."""
    name_of: Callable[[int], str] = field(default=_no_name, repr=False, compare=False)
    """Maps an image's position in the data set to its name."""
    host_index: Tensor | None = field(default=None, repr=False, compare=False)
    """``index`` on the host, so that looking up names does not wait for a GPU."""

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
        """Names of the N images in the data set, such as ``class/file.jpg``; "" for noise."""
        index = self.index if self.host_index is None else self.host_index
        return [self.name_of(position) for position in index.tolist()]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Move the batch's tensors to a device; Lightning calls this."""
        views = (view.to(device, non_blocking=non_blocking) for view in self.views)
        index = self.index.to(device, non_blocking=non_blocking)
        label = self.label.to(device, non_blocking=non_blocking)
        return replace(self, views=tuple(views), index=index, label=label)

    def chunks(self, count: int) -> list[Batch]:
        """Split into equal parts for gradient accumulation; parts have no digest and no params."""
        host_index = self.index if self.host_index is None else self.host_index
        parts = (t.chunk(count) for t in (self.index, self.label, host_index, *self.views))
        return [
            Batch(tuple(views), index, label, name_of=self.name_of, host_index=host)
            for index, label, host, *views in zip(*parts, strict=True)
        ]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a device without waiting for the device.

    NumPy copies into pinned memory, because torch's copy would wake a thread on every core. That
    takes longer than the copy and disturbs the decoding threads.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.array(array))
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True, device="cpu")
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


Crops = tuple[Tensor, ...]
"""Crops of N images before the photometric stage: one tensor for each crop size, in the order of
``AugmentConfig.by_side``. Each is (V, N, S, S, 3) uint8 on the device: the V views of size S."""

Shape = tuple[int, int, int, int, int]
"""(V, N, S, S, 3): shape of the crops of one size."""


def crop_shapes(config: AugmentConfig, images: int) -> list[Shape]:
    """Return the shapes of the ``Crops`` for a number of images."""
    return [(len(views), images, side, side, 3) for side, views in config.by_side.items()]


class Loader(Protocol):
    """Interface of training loaders: one rank's batches. Their only state is (epoch, step)."""

    @property
    def pipeline(self) -> str:
        """Name of the loader's pipeline."""

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
        """Yield an epoch's batches from step ``skip`` on. They depend only on the arguments."""

    def close(self) -> None:
        """Stop worker processes and free memory; the loader cannot be used afterwards."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """A batch of N images without augmentation, for evaluation."""

    image: Tensor
    """(N, 3, S, S) float central crops, normalised, channels-last, on the device."""
    label: Tensor
    """(N,) int64 on the device, -1 for images without a label."""
    index: Tensor
    """(N,) int64 positions in the data set, on the device; with a holdout, within the split."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> EvalBatch:
        """Move the tensors to a device; Lightning calls this."""
        tensors = self.image, self.label, self.index
        return EvalBatch(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


class EvalLoader(Protocol):
    """Interface of evaluation loaders: central crops of one rank's images, in order."""

    @property
    def images(self) -> int:
        """Total number of images over all ranks."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by label."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(``images``,) labels of the images of all ranks, -1 for images without a label."""

    def names(self) -> list[str]:
        """Return the image names of all ranks, in the data set's order."""

    def __iter__(self) -> Iterator[EvalBatch]:
        """Iterate over this rank's images once."""
