"""What a peer is told and what it returns, and how most of them load: by torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fastsiam.config import AugmentConfig, ViewConfig

Views = tuple[Tensor, Tensor]
"""Both views of a batch: (N, 3, S, S) float32, normalised. The next batch may overwrite them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a peer is to do."""

    folder: str
    """Folder of class folders of JPEGs."""
    beton: str | None
    """The same images as a .beton file."""
    augment: AugmentConfig
    batch: int
    workers: int
    images: int
    """Images of an epoch: whole batches of them."""
    device: torch.device

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return self.images // self.batch


@dataclass(frozen=True)
class Opened:
    """A peer at work."""

    version: str
    """Of its package."""
    epoch: Callable[[], Iterator[Views]]
    """Yields the batches of the next epoch."""


@dataclass(frozen=True)
class Twice:
    """Both views of an image by the same transformation."""

    view: Callable[[Any], Tensor]

    def __call__(self, image: Any) -> Views:
        """Return both views."""
        return self.view(image), self.view(image)


def load(
    job: Job,
    views: Callable[[Any], Any],
    *,
    read: Callable[[str], Any] | None = None,
    begin: Callable[[int], None] | None = None,
) -> Callable[[], Iterator[Views]]:
    """Return epochs of torch's DataLoader.

    Args:
        job: what to do.
        views: makes both views of an image, in a worker.
        read: decodes a file; default: PIL.
        begin: is called in each worker when it starts.
    """
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader

    images = ImageFolder(job.folder, views, loader=read or default_loader)
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=job.batch,
        sampler=RandomSampler(images, num_samples=job.images),  # shuffle=True, but for the length
        num_workers=job.workers,
        persistent_workers=True,
        drop_last=True,
        pin_memory=job.device.type == "cuda",
        worker_init_fn=begin,
    )

    def epoch() -> Iterator[Views]:
        for (view1, view2), _ in loader:
            yield (
                view1.to(job.device, non_blocking=True),
                view2.to(job.device, non_blocking=True),
            )

    return epoch


def scale(view: ViewConfig) -> tuple[float, float]:
    """Return the shares of an image's area between which a crop has its own."""
    return view.scale_min, view.scale_max


def ratio(view: ViewConfig) -> tuple[float, float]:
    """Return the ratios of width to height between which a crop has its own."""
    return view.ratio_min, view.ratio_max


def taps(view: ViewConfig) -> int:
    """Return how many pixels wide a blur's kernel has to be: three sigma to each side."""
    return 2 * ceil(3 * view.blur_sigma_max) + 1
