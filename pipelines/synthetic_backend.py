"""Ready tensors on the device: what training could reach if loading cost nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import TwoViewBatch

from .order import Order

IMAGES = 1_281_167
"""Images in an epoch: as many as ImageNet's training set has."""
_DISTINCT = 4


class SyntheticLoader:
    """Batches of normal noise, made once; see ``fastsiam.views.batch.Loader``."""

    def __init__(
        self,
        augment: AugmentConfig,
        *,
        batch: int,
        seed: int,
        rank: int,
        world: int,
        device: torch.device,
        dtype: torch.dtype,
        images: int,
    ) -> None:
        self._order = Order(images=images, batch=batch, seed=seed, rank=rank, world=world)
        self.source, self.images, self.steps = "noise", images, self._order.steps
        generator = torch.Generator(device).manual_seed(seed + rank)
        shape = (batch // world, 3, augment.crop, augment.crop)

        def noise() -> Tensor:
            views = torch.randn(shape, generator=generator, device=device).to(dtype)
            return views.contiguous(memory_format=torch.channels_last)

        index = torch.arange(shape[0], device=device)
        label = torch.full_like(index, -1)
        self._batches = [
            TwoViewBatch(noise(), noise(), index + i * shape[0], label) for i in range(_DISTINCT)
        ]

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
        """Yield the same few batches in turn."""
        for step in range(skip, self.steps):
            yield self._batches[(number * self.steps + step) % _DISTINCT]

    def close(self) -> None:
        """Free the batches."""
        del self._batches
