"""How well ``--shuffle window:N`` mixes, and how long its order takes, beside a full shuffle."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from fastsiam.bench.measure import clocked
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing
from fastsiam.pipelines import open_store
from fastsiam.pipelines.shuffle import Window, full_shuffle
from fastsiam.pipelines.store.base import in_order

_WINDOWS = "1,1024,4096,16384,65536"
_IMAGES, _CLASSES = 1_281_167, 1000
_BATCH = 512
"""Of the paper."""


def measure(session: Session) -> list[Record]:
    """Measure each window on the data's labels, or on as many as ImageNet's, sorted by class."""
    labels, blocks, about = _labels_and_blocks(session)
    batch, seed = session.config.batch or _BATCH, 0
    config = session.settings(batch=batch, data=about)
    whole = Window(len(labels), blocks)
    records, images = [], len(labels)
    full = _timed(session, partial(full_shuffle, images, seed), images)
    full_quality = quality(whole, labels, batch=batch, seed=seed)
    facts = {"moved": 1.0, "parted": 1.0, "usual": full_quality.usual_full}
    facts["largest"] = full_quality.largest_full
    records.append(_record("full", full, facts, config, full))
    for size in map(int, (session.config.values or _WINDOWS).split(",")):
        window = Window(size, blocks)
        timing = _timed(session, partial(window.epoch, seed), images)
        facts = asdict(quality(window, labels, batch=batch, seed=seed))
        records.append(_record(f"window:{size}", timing, facts, config, full))
    return records


def _labels_and_blocks(session: Session) -> tuple[NDArray[np.int64], NDArray[np.int64], str]:
    """Return labels and blocks of the images, and a description."""
    if not session.config.data:
        labels = np.arange(_IMAGES) * _CLASSES // _IMAGES
        return labels, in_order(_IMAGES), f"{_IMAGES:,} images of {_CLASSES:,} classes, sorted"
    config = session.config
    store = open_store(config.root, "train", columns=config.columns)
    return store.labels, store.blocks(), f"{len(store):,} images of {store.root.name}"


def _timed(session: Session, permutation: partial[NDArray[np.int64]], images: int) -> Timing:
    epochs = count()
    permutation(next(epochs))
    samples = [clocked(lambda: permutation(next(epochs))) for _ in range(session.config.repeats)]
    return Timing(samples, images)


def _record(
    name: str, timing: Timing, facts: dict[str, float], config: dict[str, object], full: Timing
) -> Record:
    return record(
        "shuffle",
        name,
        timing,
        baseline=("full", full),
        facts={key: value for key, value in facts.items() if not np.isnan(value)},
        in_the_clock="computing the order of an epoch, once in each process",
        config=config,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How well an epoch is shuffled, compared with a full shuffle of the same images."""

    moved: float
    """Mean distance between an image's place in the data and in the order, relative to a full
    shuffle's."""
    parted: float
    """Mean distance in the order between neighbours in the data, relative to a full shuffle's; the
    epoch is taken as a circle."""
    largest: float
    """Largest share of one class in a batch; nan without classes."""
    usual: float
    """Mean over the batches of the largest share of one class."""
    largest_full: float
    """``largest`` of a full shuffle."""
    usual_full: float
    """``usual`` of a full shuffle."""


def quality(window: Window, labels: NDArray[np.int64], *, batch: int, seed: int) -> Quality:
    """Measure the shuffle of a run's first epoch.

    Args:
        window: the run's.
        labels: (images,) class of each image, or -1.
        batch: images of a global batch.
        seed: the run's.
    """
    order, count = window.epoch(seed, 0), len(labels)
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    stored = np.argsort(window.blocks, kind="stable")
    full = (count**2 - 1) / (3 * count) or 1.0  # mean distance of two random places
    moved = np.abs(place[stored] - np.arange(count)).mean()
    between = np.abs(np.diff(place[stored], append=place[stored[0]]))
    parted = np.minimum(between, count - between).mean()
    largest, usual = _largest_classes(labels[order], batch)
    largest_full, usual_full = _largest_classes(labels[full_shuffle(count, seed, 0)], batch)
    return Quality(
        moved=float(moved / full),
        parted=float(parted / (count / 4)),
        largest=largest,
        usual=usual,
        largest_full=largest_full,
        usual_full=usual_full,
    )


def _largest_classes(labels: NDArray[np.int64], batch: int) -> tuple[float, float]:
    """Return the largest share of a class in any batch, and the mean of the batches' largest."""
    steps, classes = len(labels) // batch, int(labels.max(initial=-1)) + 1
    if not steps or classes < 2:
        return float("nan"), float("nan")
    whole = labels[: steps * batch]
    step = np.arange(len(whole)) // batch
    known, counts = np.unique((step * classes + whole)[whole >= 0], return_counts=True)
    most = np.zeros(steps, np.int64)
    np.maximum.at(most, known // classes, counts)
    return float(most.max() / batch), float(most.mean() / batch)
