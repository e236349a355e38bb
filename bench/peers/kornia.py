"""kornia, which works on whole batches on the device; PIL crops for it in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import torch
from torch import nn

from fastsiam.bench.peers.job import (
    Job,
    Opened,
    Twice,
    Views,
    load,
    ratio,
    scale,
    taps,
)


def start(job: Job) -> Opened:
    """Open its transformations, behind a DataLoader that crops."""
    import kornia.augmentation as K
    from torchvision.transforms import v2

    a = job.augment.views[0]
    crop = v2.Compose([v2.RandomResizedCrop(a.crop, scale(a), ratio(a)), v2.PILToTensor()])
    wide, sigma = taps(a), (a.blur_sigma_min, a.blur_sigma_max)
    finish = nn.Sequential(
        K.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue, p=a.jitter_p),
        K.RandomGrayscale(p=a.gray_p),
        K.RandomGaussianBlur((wide, wide), sigma, p=a.blur_p),
        K.RandomHorizontalFlip(p=a.flip_p),
        K.Normalize(job.augment.mean, job.augment.std),
    )
    crops = load(job, Twice(crop))

    def epoch() -> Iterator[Views]:
        with torch.no_grad():
            for view1, view2 in crops():
                yield finish(view1.float() / 255), finish(view2.float() / 255)

    return Opened(metadata.version("kornia"), epoch)
