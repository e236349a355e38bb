"""albumentations, and OpenCV, which decodes for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fastsiam.bench.peers.job import Job, Opened, Twice, load, ratio, scale


@dataclass(frozen=True)
class _Albumentations:
    """Its transformation as a function of the image."""

    transform: Any

    def __call__(self, image: Any) -> Tensor:
        view: Tensor = self.transform(image=image)["image"]
        return view


def _begin_worker(_: int) -> None:
    """Give a worker draws of its own: all inherit one generator, and would draw the same."""
    import cv2
    from torch.utils.data import get_worker_info

    cv2.setNumThreads(0)
    info: Any = get_worker_info()
    info.dataset.transform.view.transform.set_random_seed(torch.initial_seed() % 2**32)


def start(job: Job) -> Opened:
    """Open its transformations, with a copy of them in each worker."""
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # it would ask the network for a newer one
    import albumentations as A
    import cv2

    a = job.augment.views[0]
    view = A.Compose(
        [
            A.RandomResizedCrop((a.crop, a.crop), scale(a), ratio(a)),
            A.ColorJitter(a.brightness, a.contrast, a.saturation, a.hue, p=a.jitter_p),
            A.ToGray(p=a.gray_p),
            A.GaussianBlur(0, (a.blur_sigma_min, a.blur_sigma_max), p=a.blur_p),
            A.HorizontalFlip(p=a.flip_p),
            A.Normalize(job.augment.mean, job.augment.std),
            A.ToTensorV2(),
        ]
    )

    read = partial(cv2.imread, flags=cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    views = Twice(_Albumentations(view))
    return Opened(
        metadata.version("albumentations"),
        load(job, views, read=read, begin=_begin_worker),
    )
