"""slipstream: its preset of SimCLR's two views."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastsiam.bench.peers.job import Job, Opened, Views, ratio, scale


def start(job: Job) -> Opened:
    """Open its loader with the preset as it is, but for the crops' ranges and the type."""
    from slipstream.pipelines import simclr

    a, dtype = job.augment.views[0], torch.float32
    return opened(job, simclr(a.crop, scale(a), ratio(a), device=str(job.device), dtype=dtype))


def opened(job: Job, pipelines: dict[str, list[Any]]) -> Opened:
    """Open its loader.

    Args:
        job: what to do.
        pipelines: its operations, which make ``view_0`` and ``view_1`` of an ``image``.
    """
    import slipstream
    from slipstream.decoders.numba_decoder import Compiler
    from slipstream.readers import SlipstreamImageFolder

    cache = tempfile.TemporaryDirectory()  # it copies the images' bytes into one file
    images = SlipstreamImageFolder(job.folder, cache_dir=Path(cache.name))
    Compiler.set_num_threads(min(job.workers, len(os.sched_getaffinity(0))))
    loader = slipstream.SlipstreamLoader(
        images,
        batch_size=job.batch,
        indices=np.linspace(0, len(images) - 1, job.images).round().astype(np.int64),
        pipelines=pipelines,
        device=str(job.device),
        exclude_fields=["path"],
        verbose=False,
    )

    def epoch(_: Any = cache) -> Iterator[Views]:  # the file lives as long as this
        for batch in loader:
            yield batch["view_0"], batch["view_1"]

    return Opened(slipstream.__version__, epoch)
