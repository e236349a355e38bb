"""Speed of cropping decoded images, compared with torchvision and with copying the crops."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fastsiam.bench.cases.photometric import draws, for_each, measure_stage
from fastsiam.bench.measurements import Record
from fastsiam.bench.runner import Task
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import ViewParams

_ON_GPU = 25600
"""Images per repeat on a GPU."""
REFERENCE = "torchvision, image by image"
ONCE = "one pass over the crops"
_HEIGHT, _WIDTH = 375, 500


def measure(session: Session) -> list[Record]:
    """Measure fastsiam, torchvision and a copy on the same images, in one process."""
    return measure_stage(
        session,
        "geometric",
        build_geometric,
        baseline=("torchvision", REFERENCE),
        once=ONCE,
        on_gpu=_ON_GPU,
        in_the_clock="decoded images of 375 x 500 on the device to uint8 crops: crop, resize, flip",
    )


def build_geometric(
    *, augment: AugmentConfig, batch: int, batches: int, device: str
) -> dict[str, Task]:
    """Build tasks on noise images: crop with fastsiam, crop with torchvision, copy the crops."""
    values = batch * _HEIGHT * _WIDTH * 3
    pixels = torch.randint(0, 256, (values,), dtype=torch.uint8, device=device)
    size = np.full((batch, 2), (_HEIGHT, _WIDTH))
    start = np.arange(batch) * (_HEIGHT * _WIDTH * 3)
    params = draws(augment, batches, size)
    reference_images = min(batch, 64 if device == "cuda" else 8)  # it is slow
    images = pixels.view(batch, _HEIGHT, _WIDTH, 3).permute(0, 3, 1, 2)
    sources = crop_views(pixels, start, size, params[0], augment)
    copies = [torch.empty_like(source) for source in sources]

    def run_torchvision() -> None:
        for row in range(reference_images):
            for view in range(len(augment.views)):
                _by_torchvision(images[row], params[0], view, row, augment.views[view].crop)

    def touch(_: ViewParams) -> None:
        for source, copy in zip(sources, copies, strict=True):
            copy.copy_(source)

    return {
        "fastsiam": for_each(params, lambda p: crop_views(pixels, start, size, p, augment)),
        REFERENCE: Task(run_torchvision, reference_images, before=run_torchvision),
        ONCE: for_each(params, touch),
    }


def _by_torchvision(image: Tensor, params: ViewParams, view: int, row: int, side: int) -> Tensor:
    top, left, height, width = params.box[view, row].tolist()
    crop: Tensor = TF.resized_crop(
        image, top, left, height, width, [side, side], InterpolationMode.BILINEAR, antialias=True
    )
    return TF.hflip(crop) if params.flip[view, row] else crop
