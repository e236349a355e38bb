"""The photometric stage at work on crops that are ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastsiam.bench.contest import Work
from fastsiam.config import AugmentConfig
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric, reference

REFERENCE = "reference, in torch operations"
ONCE = "one pass over the bytes"


def build_photometric(
    *, augment: AugmentConfig, batch: int, batches: int, device: str
) -> dict[str, Work]:
    """Take uint8 crops through the photometric stage, its reference, and a mere conversion."""
    crops = tuple(
        torch.randint(0, 256, (len(views), batch, side, side, 3), dtype=torch.uint8, device=device)
        for side, views in augment.by_side.items()
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = np.full((batch, 2), 400)
    params = [
        draw_views(augment, seed=0, epoch=i, index=np.arange(batch), size=sizes)
        for i in range(batches)
    ]
    copies = [torch.empty_like(of_side, dtype=dtype) for of_side in crops]
    some = min(batch, 256 if device == "cuda" else 8)  # it is slow
    first, few = params[0].rows(slice(0, some)), tuple(of_side[:, :some] for of_side in crops)

    def touch(_: Any) -> None:
        for copy, of_side in zip(copies, crops, strict=True):
            copy.copy_(of_side)

    def times(one: Callable[[Any], object]) -> Work:
        def run() -> None:
            for own in params:
                one(own)  # what it makes is let go before the next

        return Work(run, batch * batches, before=lambda: one(params[0]))

    return {
        "fastsiam": times(lambda p: photometric(crops, p, augment, dtype=dtype)),
        REFERENCE: Work(lambda: reference.photometric(few, first, augment, dtype=dtype), some),
        ONCE: times(touch),
    }
