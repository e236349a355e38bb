"""What a library that streams shards is told, and how it makes views of an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastsiam.bench.peers.job import Twice, Views
from fastsiam.bench.peers.torchvision_v2 import view_of
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


def views_of(augment: AugmentConfig) -> Callable[[bytes], Views]:
    """Return what makes both views of an encoded image."""
    from torchvision.io import ImageReadMode, decode_image

    twice = Twice(view_of(augment))

    def made(data: bytes) -> Views:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return twice(decode_image(encoded, mode=ImageReadMode.RGB))

    return made


def loaded(dataset: Any, job: Job) -> Any:
    """Return torch's loader of an iterable data set."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=job.batch, num_workers=job.workers)
