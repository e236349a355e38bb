"""SPDL: its thread pipeline and decoder, with torchvision's ``transforms.v2`` behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from fastsiam.bench.peers.job import Job, Opened, Twice, Views
from fastsiam.bench.peers.torchvision_v2 import view_of


def start(job: Job) -> Opened:
    """Open its pipeline, with as many threads as workers."""
    from spdl.pipeline import PipelineBuilder
    from torchvision.datasets import ImageFolder

    files = [path for path, _ in ImageFolder(job.folder).samples]
    views_of = _views_of(job)

    def epoch() -> Iterator[Views]:
        chosen = torch.randperm(len(files))[: job.images].tolist()
        pipeline = (
            PipelineBuilder()
            .add_source([files[index] for index in chosen])
            .pipe(views_of, concurrency=job.workers)
            .aggregate(job.batch, drop_last=True)
            .pipe(_stacked)
            .add_sink(2)
            .build(num_threads=job.workers)
        )
        with pipeline.auto_stop():
            for view1, view2 in pipeline:
                yield (
                    view1.to(job.device, non_blocking=True),
                    view2.to(job.device, non_blocking=True),
                )

    return Opened(metadata.version("spdl"), epoch)


def _views_of(job: Job) -> Callable[[str], Views]:
    """Return what decodes a file by FFmpeg and makes both views of it."""
    from spdl.io import get_video_filter_desc, load_image, to_torch

    views, as_rgb = Twice(view_of(job.augment)), get_video_filter_desc(pix_fmt="rgb24")

    def make(path: str) -> Views:
        image = to_torch(load_image(path, filter_desc=as_rgb))
        return views(image.permute(2, 0, 1))

    return make


def _stacked(items: list[Any]) -> Views:
    first, second = zip(*items, strict=True)
    return torch.stack(first), torch.stack(second)
