"""litdata's StreamingDataset, on shards of its own form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastsiam.bench.peers.job import Views
from fastsiam.bench.streaming.job import Job, views_of

SHARDS = "litdata"
"""What it reads, among the folders that the case makes."""
_CHUNK = 1 << 25


def convert(files: list[Path], out: Path) -> None:
    """Write images in its form."""
    from litdata import optimize

    optimize(
        fn=_sample,
        inputs=[str(path) for path in files],
        output_dir=str(out),
        chunk_bytes=_CHUNK,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def epoch(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch, shuffled by itself."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # as it is, it would have https alone
    views = views_of(job.augment)

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Views:
            return views(super().__getitem__(index)["image"])

    images = Images(
        job.shards,
        cache_dir=job.cache or None,
        shuffle=True,
        storage_options=_options() if "://" in job.shards else None,
    )
    yield from StreamingDataLoader(images, batch_size=job.batch, num_workers=job.workers)


def _sample(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes()}


def _options() -> dict[str, Any]:
    """Return what boto3's client is told: the server asks nobody's name."""
    from botocore import UNSIGNED
    from botocore.config import Config

    return {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "region_name": os.environ["AWS_REGION"],
        "config": Config(signature_version=UNSIGNED),
    }
