"""webdataset, on the same tars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastsiam.bench.peers.job import Views
from fastsiam.bench.streaming.job import Job, loaded, views_of

SHARDS = "tars"
"""What it reads, among the folders that the case makes."""


def epoch(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch: shards and images shuffled, as its documentation has it."""
    import webdataset

    views = views_of(job.augment)

    def made(sample: dict[str, Any]) -> Views:
        return views(sample["jpg"])

    images = (
        webdataset.WebDataset(
            [f"{job.shards}/train-{number:04}.tar" for number in range(job.count)],
            shardshuffle=job.count,
            cache_dir=job.cache or None,
        )
        .shuffle(job.window)
        .map(made)
    )
    yield from loaded(images, job)
