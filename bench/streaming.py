"""Other libraries that stream shards from object storage, as ``bench storage`` sets them to work.

Each decodes and makes both views as torchvision's ``transforms.v2`` does, in worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench.cases.peers import Twice, Views, torchvision_view
from fastsiam.bench.peers import Peer
from fastsiam.config import AugmentConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one of them is to do."""

    shards: str
    """Folder or address of the shards, in the library's own form."""
    count: int
    """How many shards there are."""
    cache: str
    """Folder in which it keeps what it fetches; "" for none."""
    augment: AugmentConfig
    batch: int
    workers: int
    window: int
    """Images that are shuffled among each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(Peer):
    """One of them."""

    shards: str
    """What it reads, among the folders that the case makes."""
    epoch: Callable[[Job], Iterator[Views]]
    """Yields the batches of an epoch."""


def convert_for_litdata(files: list[Path], out: Path) -> None:
    """Write images in litdata's form."""
    from litdata import optimize

    optimize(
        fn=_sample,
        inputs=[str(path) for path in files],
        output_dir=str(out),
        chunk_bytes=1 << 25,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )


def _sample(path: str) -> dict[str, Any]:
    return {"image": Path(path).read_bytes()}


def _by_litdata(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch, shuffled by litdata itself."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # as it is, it would have https alone
    views, remote = _views_of(job.augment), "://" in job.shards

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Views:
            return views(super().__getitem__(index)["image"])

    options = {  # the server asks nobody's name
        "endpoint_url": os.environ.get("AWS_ENDPOINT_URL"),
        "region_name": os.environ.get("AWS_REGION"),
        "config": Config(signature_version=UNSIGNED),
    }
    images = Images(
        job.shards,
        cache_dir=job.cache or None,
        shuffle=True,
        storage_options=options if remote else None,
    )
    yield from StreamingDataLoader(images, batch_size=job.batch, num_workers=job.workers)


def _by_webdataset(job: Job) -> Iterator[Views]:
    """Yield the batches of an epoch: shards and images shuffled, as its documentation has it."""
    import webdataset
    from torch.utils.data import DataLoader

    views = _views_of(job.augment)

    def decode(sample: dict[str, Any]) -> Views:
        return views(sample["jpg"])

    shards = webdataset.WebDataset(
        [f"{job.shards}/train-{number:04}.tar" for number in range(job.count)],
        shardshuffle=job.count,
        cache_dir=job.cache or None,
    )
    images = shards.shuffle(job.window).map(decode)
    yield from DataLoader(images, batch_size=job.batch, num_workers=job.workers)


def _views_of(augment: AugmentConfig) -> Callable[[bytes], Views]:
    """Return what makes both views of an encoded image."""
    from torchvision.io import ImageReadMode, decode_image

    twice = Twice(torchvision_view(augment))

    def views(data: bytes) -> Views:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return twice(decode_image(encoded, mode=ImageReadMode.RGB))

    return views


STREAMING = {
    "webdataset": Streaming(
        title="webdataset",
        packages=("webdataset",),
        install="webdataset",
        differs="Reads whole shards one after the other, by curl; keeps whole shards; decodes and "
        "makes views by torchvision's transforms.v2.",
        shards="tars",
        epoch=_by_webdataset,
    ),
    "litdata": Streaming(
        title="litdata",
        packages=("litdata", "boto3"),
        install="litdata boto3",
        differs="Reads shards of its own form, of 32 MiB, whole, by boto3, and keeps them on disk "
        "in any case; decodes and makes views by torchvision's transforms.v2.",
        shards="litdata",
        epoch=_by_litdata,
    ),
}
"""All of them, by name."""
