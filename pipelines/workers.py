"""Loader processes: how many, and how they behave."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .processes import cores, leave_signals_to_the_parent


def count(workers: int) -> int:
    """Fill in -1: the cores that this process may use, shared among the ranks of this machine."""
    if workers >= 0:
        return workers
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def in_workers(
    dataset: Dataset[Any],
    tasks: Iterable[Any],
    *,
    workers: int,
    device: torch.device,
    persistent: bool,
) -> DataLoader[Any]:
    """Run ``dataset[task]`` for each task in loader processes; results in order, uncollated."""
    workers = count(workers)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        persistent_workers=persistent and workers > 0,
        worker_init_fn=_begin_worker,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a persistent loader's processes now, whoever still holds one of its iterators."""
    iterator = getattr(loader, "_iterator", None)  # torch offers no public way
    if iterator is not None:
        iterator._shutdown_workers()


def _as_it_is(item: Any) -> Any:
    return item


def _begin_worker(_: int) -> None:
    leave_signals_to_the_parent()
