"""slipstream: two crops of an image and no colours, its operations one by one."""

from __future__ import annotations

from typing import Any

import torch

from fastsiam.bench.peers import slipstream
from fastsiam.bench.peers.job import Job, Opened, ratio, scale


def start(job: Job) -> Opened:
    """Open its loader with a decoder of two crops, and what makes tensors of them."""
    from slipstream import DecodeMultiRandomResizedCrop, MultiCropPipeline
    from slipstream.transforms import Normalize, RandomHorizontalFlip, ToTorchImage

    a, device, dtype = job.augment.views[0], str(job.device), torch.float32
    crop = {"size": a.crop, "scale": scale(a), "ratio": ratio(a)}
    names = ("view_0", "view_1")

    def view() -> list[Any]:
        return [
            ToTorchImage(device=device, dtype=dtype),
            RandomHorizontalFlip(p=a.flip_p, device=device),
            Normalize(job.augment.mean, job.augment.std, device=device, dtype=dtype),
        ]

    decode = DecodeMultiRandomResizedCrop({name: dict(crop) for name in names})
    return slipstream.opened(
        job, {"image": [decode, MultiCropPipeline({name: view() for name in names})]}
    )
