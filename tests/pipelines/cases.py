"""What tests of all pipelines share: which there are, loaders of them, batches compared."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fastsiam.config import AugmentConfig, ConvertConfig, DataConfig, Pipeline
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.views.batch import Batch, Loader

NEEDS = {"ffcv": [pytest.mark.ffcv], "dali": [pytest.mark.dali]}
PIPELINES = [pytest.param(name, marks=NEEDS.get(name, [])) for name in get_args(Pipeline)]
WITH_IMAGES = [name for name in PIPELINES if name.values != ("synthetic",)]
OPTIONAL = [name for name in WITH_IMAGES if name.values[0] in NEEDS]
"""Those whose package need not be installed."""
THREADED = [name for name in WITH_IMAGES if name.values[0] in (*NEEDS, "native")]
_M_MMAP_THRESHOLD = -3
SMALL = AugmentConfig.alike(crop=16)


def readable(name: str, root: Path) -> Path:
    """Return what a pipeline can read: FFCV wants a converted file."""
    if name != "ffcv" or not root.is_dir() or list(root.glob("*.beton")):
        return root
    out = root.with_name(root.name + "-converted")
    if not out.exists():
        convert_data("folder", ConvertConfig(source=str(root), out=str(out)))
    return out


def build(
    name: str,
    root: Path,
    *,
    batch: int = 8,
    augment: AugmentConfig = SMALL,
    workers: int = 0,
    **place: Any,
) -> Loader:
    address = str(readable(name, root))
    return build_at(name, address, batch=batch, augment=augment, workers=workers, **place)


def build_at(
    name: str,
    address: str,
    *,
    batch: int = 8,
    augment: AugmentConfig = SMALL,
    workers: int = 0,
    **place: Any,
) -> Loader:
    """Do the same of data that may lie on another machine."""
    data = DataConfig(data=address, pipeline=name, workers=workers)  # type: ignore[arg-type]
    return build_loader(data, augment, batch=batch, **place)


def first(loader: Loader, epoch: int = 0) -> Batch:
    try:
        return next(iter(loader.epoch(epoch)))
    finally:
        loader.close()


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return (*batch.views, batch.index, batch.label)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def joined(parts: Sequence[Batch]) -> Batch:
    """Return the batch that the ranks' parts make together."""
    *views, index, label = (torch.cat(own) for own in zip(*map(tensors, parts), strict=True))
    return Batch(tuple(views), index, label)


def levels(one: torch.Tensor, other: torch.Tensor, config: AugmentConfig) -> torch.Tensor:
    return (one - other).abs() * torch.tensor(config.std).view(3, 1, 1) * 255


def threads() -> set[int]:
    """Return the numbers of this process's threads."""
    return set(map(int, os.listdir("/proc/self/task")))


def ended(some: set[int], *, seconds: float = 60) -> bool:
    """Wait until none of these threads is there: one that is joined is listed for a moment."""
    limit = time.monotonic() + seconds
    while some & threads():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_at_once() -> None:
    """Have large blocks of memory, once freed, leave the process: its size tells what it holds."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**17)  # otherwise it grows with what is freed


def growth(sizes: Sequence[int]) -> int:
    """Return by how much a process grew with its epochs, in bytes, by its size after each.

    The first third is for what is made once. Of the others the smallest sizes count: what comes and
    goes is no growth. The process has to be one of its own, where nothing else takes or frees
    memory; it may be forked, for what it has from the beginning is there in all its sizes.
    """
    third = len(sizes) // 3
    return min(sizes[-third:]) - min(sizes[third:-third])
