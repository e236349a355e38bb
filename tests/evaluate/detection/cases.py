"""Small detection sets in memory, and random detections of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.evaluate.detection import Detections, DetectionSet, Picture, Segmentation

Box = tuple[float, float, float, float]


@dataclass
class InMemory(DetectionSet):
    """Pictures without images."""

    rows: list[Picture]
    classes: tuple[str, ...] = ("a", "b")
    name: str = "a set in memory"

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, index: int) -> Picture:
        return self.rows[index]


def picture(
    image_id: int,
    boxes: Sequence[Box],
    labels: Sequence[int] | None = None,
    *,
    difficult: Sequence[int] = (),
    crowd: Sequence[int] = (),
    masks: tuple[Segmentation, ...] | None = None,
) -> Picture:
    """Make a picture of 100 x 100; ``difficult`` and ``crowd`` are positions of boxes."""
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    sides = corners[:, 2:] - corners[:, :2]
    places = np.arange(len(corners))
    return Picture(
        file=f"{image_id}.jpg",
        height=100,
        width=100,
        boxes=corners,
        labels=np.array(labels if labels is not None else [0] * len(corners), np.int64),
        difficult=np.isin(places, np.array(difficult)),
        crowd=np.isin(places, np.array(crowd)),
        areas=sides[:, 0] * sides[:, 1],
        masks=masks,
        image_id=image_id,
    )


def detections(
    image_id: int,
    boxes: Sequence[Box] | NDArray[np.float32],
    scores: Sequence[float] | NDArray[np.float64],
    labels: Sequence[int] | NDArray[np.int64] | None = None,
    masks: tuple[Segmentation, ...] | None = None,
) -> Detections:
    """Make the detections of one image."""
    return Detections(
        image_id,
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(scores, np.float32),
        np.array(labels if labels is not None else [0] * len(scores), np.int64),
        masks,
    )


def random_case(
    seed: int, *, images: int = 12, ignored: bool = False
) -> tuple[InMemory, list[Detections]]:
    """Draw pictures of three classes, and detections: objects moved about, and false ones.

    Scores have two decimals, so that some are equal.
    """
    generator = np.random.default_rng(seed)
    pictures, found = [], []
    for number in range(images):
        count = int(generator.integers(0, 6))
        corner = generator.uniform(0, 70, (count, 2))
        boxes = np.concatenate([corner, corner + generator.uniform(5, 30, (count, 2))], 1)
        labels = generator.integers(0, 3, count)
        marked = np.flatnonzero(generator.random(count) < 0.25 * ignored)
        rows = [tuple(map(float, box)) for box in boxes]
        pictures.append(picture(number, rows, labels, difficult=list(marked)))  # type: ignore[arg-type]
        kept = np.repeat(boxes, 2, axis=0) + generator.normal(0, 2, (2 * count, 4))
        false = generator.uniform(0, 70, (3, 2))
        false = np.concatenate([false, false + generator.uniform(5, 30, (3, 2))], 1)
        every = np.concatenate([kept, false]).astype(np.float32)
        every[:, 2:] = np.maximum(every[:, 2:], every[:, :2] + 1)
        names = np.concatenate([np.repeat(labels, 2), generator.integers(0, 3, 3)])
        found.append(detections(number, every, generator.uniform(0, 1, len(every)).round(2), names))
    return InMemory(pictures, ("a", "b", "c")), found
