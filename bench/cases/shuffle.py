"""How well ``--shuffle window:N`` mixes, and what its order costs, against a full shuffle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from fastsiam.bench.bench_images import folder_name, users_store
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.pipelines.shuffle import Window, full_shuffle
from fastsiam.pipelines.store.base import in_order

_WINDOWS = (1, 1024, 4096, 16384, 65536)
_IMAGES, _CLASSES = 1_281_167, 1000
_BATCH = 512
"""Batch size of the paper."""
_SEED = 0


def measure(session: Session) -> list[Record]:
    """Measure each window on the data's labels; without data, on sorted labels like ImageNet's."""
    labels, blocks, data_text = _labels_and_blocks(session)
    batch, images = session.config.batch or _BATCH, len(labels)
    sizes = session.config.values or _WINDOWS
    of_full = largest_classes(labels[full_shuffle(images, _SEED, 0)], batch)
    facts = {"full": {"moved": 1.0, "parted": 1.0} | of_full}
    for size in sizes:
        order = Window(size, blocks).epoch(_SEED, 0)
        facts[f"window:{size}"] = distances(order, blocks) | largest_classes(labels[order], batch)
    rows = (
        Row(
            case="shuffle",
            name=name,
            runner="shuffle",
            build=partial(build_orders, sizes=sizes, blocks=blocks),
            baseline=("full", "full"),
            facts=facts[name],
            in_the_clock="computing the order of an epoch, once in each process",
            config=session.settings(batch=batch, data=data_text),
        )
        for name in facts
    )
    return compare(session, rows)


def _labels_and_blocks(session: Session) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return labels and blocks of the images, and a description."""
    store = users_store(session.config)
    if store is None:
        labels = np.arange(_IMAGES) * _CLASSES // _IMAGES
        return labels, in_order(_IMAGES), f"{_IMAGES:,} images of {_CLASSES:,} classes, sorted"
    about = f"{len(store):,} images of {folder_name(store.root)}"
    return store.labels, store.blocks(), about


def build_orders(*, sizes: Sequence[int], blocks: NDArray[np.int64]) -> dict[str, Task]:
    """Build tasks that compute the order of an epoch; each repeat takes the next epoch."""
    images, epochs = len(blocks), count()

    def task(order: Callable[[int, int], object]) -> Task:
        return Task(lambda: order(_SEED, next(epochs)), images)

    windows = {f"window:{size}": task(Window(size, blocks).epoch) for size in sizes}
    return {"full": task(partial(full_shuffle, images))} | windows


def distances(order: NDArray[np.int64], blocks: NDArray[np.int64]) -> dict[str, float]:
    """Return how far images move and neighbours separate, relative to a full shuffle.

    Args:
        order: (images,) images in the epoch's order.
        blocks: (images,) place of each image in the data.

    Returns:
        "moved": mean distance between an image's place in the data and in the order. "parted": mean
        distance in the order between neighbours in the data, where the epoch wraps around.
    """
    images = len(order)
    position_of = np.empty(images, np.int64)
    position_of[order] = np.arange(images)
    positions = position_of[np.argsort(blocks, kind="stable")]
    full = (images**2 - 1) / (3 * images) or 1.0  # mean distance of two random places
    shift = np.abs(positions - np.arange(images)).mean()
    gaps = np.abs(np.diff(positions, append=positions[0]))
    mean_gap = np.minimum(gaps, images - gaps).mean()
    return {"moved": float(shift / full), "parted": float(mean_gap / (images / 4))}


def largest_classes(labels: NDArray[np.int64], batch: int) -> dict[str, float]:
    """Return the share of the most frequent class in the batches of an epoch.

    Args:
        labels: (images,) class of each image in the epoch's order, or -1.
        batch: global batch size.

    Returns:
        "largest": maximum over the batches. "usual": their mean. Empty with fewer than two classes.
    """
    steps, classes = len(labels) // batch, int(labels.max(initial=-1)) + 1
    if not steps or classes < 2:
        return {}
    subset = labels[: steps * batch]
    step = np.arange(len(subset)) // batch
    pairs, counts = np.unique((step * classes + subset)[subset >= 0], return_counts=True)
    largest = np.zeros(steps, np.int64)
    np.maximum.at(largest, pairs // classes, counts)
    return {"largest": float(largest.max() / batch), "usual": float(largest.mean() / batch)}
