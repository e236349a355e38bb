"""The synthetic pipeline: noise on the device, to measure training without loading cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastsiam.views.batch import Batch
from fastsiam.views.digest import batch_digest

from .loaders import LoaderSpec
from .order import Order

_DISTINCT = 4


def noise_digest(order: Order, epoch: int, step: int) -> int:
    """Return the digest of a batch of noise, which has no augmentation parameters."""
    share = order.batch // order.world
    index = order.place((epoch * order.steps + step) % _DISTINCT) + np.arange(share)
    return batch_digest(None, index, epoch=epoch, place=order.place(step))


class SyntheticLoader:
    """Batches of Gaussian noise, generated once; see ``fastsiam.views.batch.Loader``."""

    def __init__(self, spec: LoaderSpec) -> None:
        self.pipeline, self._order = spec.data.pipeline, spec.order
        order = spec.order
        self.source, self.images, self.steps = "noise", order.images, order.steps
        generator = torch.Generator(spec.device).manual_seed(order.seed + order.rank)
        batch = order.batch // order.world

        def noise(side: int) -> Tensor:
            shape = (batch, 3, side, side)
            views = torch.randn(shape, generator=generator, device=spec.device)
            return views.to(spec.dtype).contiguous(memory_format=torch.channels_last)

        index = torch.arange(batch, device=spec.device)
        label = torch.full_like(index, -1)
        sides = [view.crop for view in spec.augment.views]
        self._batches = [
            Batch(tuple(map(noise, sides)), index + order.place(i), label) for i in range(_DISTINCT)
        ]

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the same few batches in rotation."""
        for step in range(skip, self.steps):
            batch = self._batches[(number * self.steps + step) % _DISTINCT]
            yield replace(batch, digest=noise_digest(self._order, number, step))

    def close(self) -> None:
        """Free the batches."""
        self._batches.clear()
