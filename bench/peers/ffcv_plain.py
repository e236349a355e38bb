"""FFCV with operations of its own only."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsiam.bench.peers.job import Job, Opened, Views, ratio, scale
from fastsiam.pipelines.store.beton import BetonStore


def start(job: Job) -> Opened:
    """Open its loader with two pipelines for the same field."""
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.pipeline.pipeline_spec import PipelineSpec
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        ToDevice,
        ToTensor,
        ToTorchImage,
    )

    assert job.beton is not None, "ffcv reads .beton files only"
    a, gpu = job.augment.views[0], job.device.type == "cuda"
    mean, std = 255 * np.array(job.augment.mean), 255 * np.array(job.augment.std)

    def view() -> list[Any]:
        # On a GPU its normalisation would need cupy, which it does not install.
        normalised = [] if gpu else [NormalizeImage(mean, std, np.float32)]
        there = [ToDevice(job.device)] if gpu else []
        return [
            RandomResizedCropRGBImageDecoder((a.crop, a.crop), scale(a), ratio(a)),
            RandomHorizontalFlip(a.flip_p),
            *normalised,
            ToTensor(),
            *there,
            ToTorchImage(),
        ]

    store = BetonStore(Path(job.beton))
    loader = Loader(
        job.beton,
        batch_size=job.batch,
        num_workers=job.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        indices=np.linspace(0, len(store) - 1, job.images).round().astype(np.int64),
        pipelines=dict.fromkeys(store.fields)
        | {store.image_field: view(), "second": PipelineSpec(store.image_field, transforms=view())},
    )
    on_device = [
        torch.tensor(values, dtype=torch.float32, device=job.device)[:, None, None]
        for values in (mean, std)
    ]

    def normalise(view: Tensor) -> Tensor:
        return view.float().sub_(on_device[0]).div_(on_device[1]) if gpu else view

    def epoch() -> Iterator[Views]:
        for view1, view2 in loader:
            yield normalise(view1), normalise(view2)

    return Opened(metadata.version("ffcv"), epoch)
