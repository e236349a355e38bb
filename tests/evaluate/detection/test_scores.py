"""Average precision against hand-computed values and a slow implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.ops import box_iou

from fastsiam.errors import DataError
from fastsiam.evaluate.detection import Detections, DetectionSet, Picture, voc_scores
from fastsiam.evaluate.detection.scores import Rule
from tests.evaluate.detection.tiny import picture

Box = tuple[float, float, float, float]
BOX: Box = (10, 10, 30, 30)
FAR: Box = (40, 40, 60, 60)
OTHER: Box = (10, 40, 30, 60)


def truth_of(*pictures: Picture, classes: tuple[str, ...] = ("a", "b")) -> DetectionSet:
    return DetectionSet("a set", classes, list(pictures))


def detections(boxes: Any, scores: Any, labels: Any = None) -> Detections:
    return Detections(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(scores, np.float32),
        np.array([0] * len(scores) if labels is None else labels, np.int64),
    )


def ap50(truth: DetectionSet, predictions: list[Detections], rule: Rule = "area") -> float:
    return voc_scores(truth, predictions, rule)["AP50"]


def test_voc_ap_matches_manual_computation() -> None:
    """Three objects; right, wrong, right: recall 1/3, 1/3, 2/3 and precision 1, 1/2, 2/3."""
    truth = truth_of(picture([BOX, FAR]), picture([BOX]))
    predictions = [detections([BOX, OTHER, FAR], [0.9, 0.8, 0.7]), detections([], [])]
    # The best precision is 1 at recalls 0 to 0.3, 2/3 at 0.4 to 0.6 and 0 beyond.
    assert ap50(truth, predictions, "11 points") == pytest.approx(100 * (4 + 3 * 2 / 3) / 11)
    assert ap50(truth, predictions) == pytest.approx(100 * (1 / 3 + 1 / 3 * 2 / 3))
    # The left half of BOX has an IoU of exactly 0.5, which is not above VOC's threshold.
    truth = truth_of(picture([BOX]))
    assert ap50(truth, [detections([(10, 10, 20, 30)], [0.5])]) == 0
    assert ap50(truth, [detections([(10, 10, 20.01, 30)], [0.5])]) == 100


def test_difficult_objects_and_empty_classes_are_ignored() -> None:
    truth = truth_of(picture([BOX, FAR], difficult=[1]))
    predictions = [detections([BOX, FAR, FAR, OTHER], [0.5, 0.9, 0.8, 0.9], [0, 0, 0, 1])]
    assert ap50(truth, predictions) == ap50(truth, predictions, "11 points") == 100
    assert voc_scores(truth, [detections([], [])]) == {"AP": 0, "AP50": 0, "AP75": 0}
    with pytest.raises(DataError, match="no object"):
        voc_scores(truth_of(picture([BOX], difficult=[0])), [])


def random_case(seed: int) -> tuple[DetectionSet, list[Detections]]:
    """Draw pictures with three classes, and detections: shifted objects and false positives.

    Scores are rounded to two decimals so that some are equal.
    """
    generator = np.random.default_rng(seed)

    def boxes_of(count: int) -> NDArray[np.float64]:
        corner = generator.uniform(0, 70, (count, 2))
        return np.concatenate([corner, corner + generator.uniform(5, 30, (count, 2))], 1)

    pictures, predictions = [], []
    for _ in range(12):
        count = int(generator.integers(0, 6))
        boxes, labels = boxes_of(count), generator.integers(0, 3, count)
        difficult = np.flatnonzero(generator.random(count) < 0.25)
        pictures.append(picture(boxes, labels, difficult=difficult))
        shifted = np.repeat(boxes, 2, axis=0) + generator.normal(0, 2, (2 * count, 4))
        every = np.concatenate([shifted, boxes_of(3)])
        every[:, 2:] = np.maximum(every[:, 2:], every[:, :2] + 1)
        names = np.concatenate([np.repeat(labels, 2), generator.integers(0, 3, 3)])
        predictions.append(detections(every, generator.uniform(0, 1, len(every)).round(2), names))
    return truth_of(*pictures, classes=("a", "b", "c")), predictions


@pytest.mark.parametrize("seed", range(4))
def test_voc_ap_equals_slow_implementation(seed: int) -> None:
    """The slow implementation matches one detection at a time."""
    truth, predictions = random_case(seed)
    rules: tuple[Rule, ...] = ("11 points", "area")
    for rule in rules:
        expected = [
            100 * sum(_slow_average(truth, predictions, label, least, rule) for label in range(3))
            for least in (0.5 + 0.05 * step for step in range(10))
        ]
        scores = voc_scores(truth, predictions, rule)
        assert scores["AP50"] == pytest.approx(expected[0] / 3)
        assert scores["AP75"] == pytest.approx(expected[5] / 3)
        assert scores["AP"] == pytest.approx(sum(expected) / 30)


def _slow_average(
    truth: DetectionSet, predictions: list[Detections], label: int, least: float, rule: str
) -> float:
    object_count = sum(((one.labels == label) & ~one.difficult).sum() for one in truth.pictures)
    rows = [
        (float(score), box, number)
        for number, one in enumerate(predictions)
        for score, box, predicted_label in zip(one.scores, one.boxes, one.labels, strict=True)
        if predicted_label == label
    ]
    matched: set[tuple[int, int]] = set()
    right = wrong = 0
    points: list[tuple[float, float]] = []
    for _, box, number in sorted(rows, key=lambda row: -row[0]):  # a stable sort
        one = truth.pictures[number]
        overlaps = box_iou(torch.tensor(box)[None], torch.tensor(one.boxes))[0].numpy()
        overlaps[one.labels != label] = -1
        place = int(overlaps.argmax()) if len(overlaps) else -1
        hit = place >= 0 and overlaps[place] > least
        if hit and one.difficult[place]:
            continue
        if hit and (number, place) not in matched:
            matched.add((number, place))
            right += 1
        else:
            wrong += 1
        points.append((right / object_count, right / (right + wrong)))
    if rule == "11 points":  # like numpy's multiples: 3 * 0.1 is 0.30000000000000004
        return sum(max((p for r, p in points if r >= n * 0.1), default=0) for n in range(11)) / 11
    area = before = 0.0
    for recall, _ in points:
        area += (recall - before) * max(p for r, p in points if r >= recall)
        before = recall
    return area
