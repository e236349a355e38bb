"""Noise that lies on the device: the speed of training if loading cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Batch
from fastsiam.views.digest import batch_digest

from .order import Order

_DISTINCT = 4


def noise_shown(order: Order, epoch: int, step: int) -> int:
    """Return the digest of a batch of noise, for which nothing is drawn."""
    share = order.batch // order.world
    index = order.place((epoch * order.steps + step) % _DISTINCT) + np.arange(share)
    return batch_digest(None, index, epoch=epoch, place=order.place(step))


class SyntheticLoader:
    """Batches of normal noise, made once; see ``fastsiam.views.batch.Loader``."""

    def __init__(
        self,
        store: None,
        order: Order,
        augment: AugmentConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.images, self.steps = "noise", order.images, order.steps
        self._order = order
        generator = torch.Generator(device).manual_seed(order.seed + order.rank)
        batch = order.batch // order.world

        def noise(side: int) -> Tensor:
            shape = (batch, 3, side, side)
            views = torch.randn(shape, generator=generator, device=device).to(dtype)
            return views.contiguous(memory_format=torch.channels_last)

        index = torch.arange(batch, device=device)
        label = torch.full_like(index, -1)
        self._batches = [
            Batch(tuple(noise(view.crop) for view in augment.views), index + order.place(i), label)
            for i in range(_DISTINCT)
        ]

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the same few batches in turn."""
        for step in range(skip, self.steps):
            batch = self._batches[(number * self.steps + step) % _DISTINCT]
            yield replace(batch, seen=noise_shown(self._order, number, step))

    def close(self) -> None:
        """Free the batches."""
        del self._batches
