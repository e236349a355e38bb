"""lightly's ``SimSiamTransform``."""

from __future__ import annotations

from importlib import metadata

from fastsiam.bench.peers.job import Job, Opened, load


def start(job: Job) -> Opened:
    """Open its transformation, as its documentation has it."""
    from lightly.transforms.simsiam_transform import SimSiamTransform

    augment = job.augment
    views = SimSiamTransform(input_size=augment.crop, gaussian_blur=augment.views[0].blur_p)
    return Opened(metadata.version("lightly"), load(job, views))
