"""torchvision's ``transforms.v2`` on tensors."""

from __future__ import annotations

from functools import partial
from importlib import metadata

import torch

from fastsiam.bench.contestants.peers.job import (
    Job,
    Opened,
    Twice,
    load,
    ratio,
    scale,
    taps,
)


def start(job: Job) -> Opened:
    """Open the transformations, images decoded to tensors."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    a = job.augment.views[0]
    blur = v2.GaussianBlur(taps(a), (a.blur_sigma_min, a.blur_sigma_max))
    view = v2.Compose(
        [
            v2.RandomResizedCrop(a.crop, scale(a), ratio(a), antialias=True),
            v2.RandomApply(
                [v2.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue)], p=a.jitter_p
            ),
            v2.RandomGrayscale(a.gray_p),
            v2.RandomApply([blur], p=a.blur_p),
            v2.RandomHorizontalFlip(a.flip_p),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(job.augment.mean, job.augment.std),
        ]
    )
    read = partial(decode_image, mode=ImageReadMode.RGB)
    return Opened(metadata.version("torchvision"), load(job, Twice(view), read=read))
