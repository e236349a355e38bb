"""torchvision's ``transforms.v2`` on tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch

from fastsiam.bench.peers.job import (
    Job,
    Opened,
    Twice,
    load,
    ratio,
    scale,
    taps,
)
from fastsiam.config import AugmentConfig


def start(job: Job) -> Opened:
    """Open the transformations, images decoded to tensors."""
    from torchvision.io import ImageReadMode, decode_image

    read = partial(decode_image, mode=ImageReadMode.RGB)
    views = Twice(view_of(job.augment))
    return Opened(metadata.version("torchvision"), load(job, views, read=read))


def view_of(augment: AugmentConfig) -> Callable[[Any], Any]:
    """Return what makes a view of a decoded image, a uint8 tensor."""
    from torchvision.transforms import v2

    a = augment.views[0]
    blur = v2.GaussianBlur(taps(a), (a.blur_sigma_min, a.blur_sigma_max))
    view: Callable[[Any], Any] = v2.Compose(
        [
            v2.RandomResizedCrop(a.crop, scale(a), ratio(a), antialias=True),
            v2.RandomApply(
                [v2.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)], p=a.jitter_p
            ),
            v2.RandomGrayscale(a.gray_p),
            v2.RandomApply([blur], p=a.blur_p),
            v2.RandomHorizontalFlip(a.flip_p),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(augment.mean, augment.std),
        ]
    )
    return view
