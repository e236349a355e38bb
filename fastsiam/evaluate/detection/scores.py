"""Average precision of detections: VOC's two rules, and COCO's with pycocotools.

``voc_scores`` is comparable with the papers' results on VOC. MoCo and SimSiam were measured with
detectron2, which applies VOC's eleven-point rule for the 2007 test set at overlaps of 0.50, 0.55,
... 0.95, and calls their mean AP. detectron2 rounds scores to three decimals and boxes to one;
``voc_scores`` does not round.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.ops import box_convert, box_iou

from .datasets import DetectionSet

Rule = Literal["11 points", "area"]
"""How VOC averages precision over recall: the mean precision at recalls 0, 0.1, ... 1 (until 2009),
or the area under the curve (since 2010)."""

_POINTS = np.arange(0.0, 1.1, 0.1)
"""Recalls of the eleven points, with the rounding errors of detectron2's: 0.30000000000000004."""


@dataclass(frozen=True)
class Detections:
    """The n objects detected in one image, in any order."""

    boxes: NDArray[np.float32]
    """(n, 4) x0, y0, x1, y1 in pixels of the original image."""
    scores: NDArray[np.float32]
    """(n,) confidences; only their order matters."""
    labels: NDArray[np.int64]
    """(n,) indices into the data set's classes."""
    masks: tuple[dict[str, Any], ...] = ()
    """(n,) run lengths from ``pycocotools.mask.encode``; empty without masks."""


def voc_scores(
    dataset: DetectionSet, detections: Sequence[Detections], rule: Rule = "11 points"
) -> dict[str, float]:
    """Return AP, AP50 and AP75 in percent, averaged over classes, as detectron2 does on VOC.

    detectron2 uses the rule "11 points" for the 2007 test set and "area" for 2012.

    Each detection is matched with the object of its class in its image that it overlaps most. It is
    correct if this overlap exceeds the threshold and no detection with a higher score has taken the
    object. A match with a difficult object is ignored. Detections with equal scores keep their
    order. Classes without objects that are not difficult are left out.

    Args:
        dataset: the ground truth.
        detections: those in each picture, in the order of the data set.
        rule: how the precision-recall curve is averaged.

    Raises:
        DataError: all objects in the data set are difficult, or it has none.
    """
    dataset.check_has_objects()
    counted_labels = np.concatenate([one.labels[~one.difficult] for one in dataset.pictures])
    overlaps, rows = [percent / 100 for percent in range(50, 100, 5)], []
    for label in range(len(dataset.classes)):
        if object_count := int((counted_labels == label).sum()):
            matches = _matches(dataset, detections, label)
            rows.append([_average_precision(matches, x, object_count, rule) for x in overlaps])
    mean = 100 * np.array(rows).mean(axis=0)
    return {"AP50": float(mean[0]), "AP": float(mean.mean()), "AP75": float(mean[5])}


def coco_scores(
    dataset: DetectionSet,
    detections: Sequence[Detections],
    kind: Literal["bbox", "segm"] = "bbox",
) -> dict[str, float]:
    """Return AP, AP50 and AP75 in percent, measured with pycocotools.

    Args:
        dataset: the ground truth, with COCO's annotations.
        detections: those in each picture, in the order of the data set.
        kind: "bbox" compares boxes, "segm" masks.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    categories = sorted(dataset.coco.cats)
    rows: list[dict[str, Any]] = []
    for image_id, one in zip(dataset.coco.imgs, detections, strict=True):
        boxes = box_convert(torch.from_numpy(one.boxes).double(), "xyxy", "xywh")
        field, shapes = ("bbox", boxes.tolist()) if kind == "bbox" else ("segmentation", one.masks)
        rows += [
            {"image_id": image_id, "category_id": categories[label], "score": score, field: shape}
            for label, score, shape in zip(one.labels, one.scores.tolist(), shapes, strict=True)
        ]
    with contextlib.redirect_stdout(io.StringIO()):
        results = dataset.coco.loadRes(rows) if rows else COCO()
        evaluation = COCOeval(dataset.coco, results, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = ("AP", "AP50", "AP75")
    return {name: 100 * float(evaluation.stats[index]) for index, name in enumerate(names)}


def _matches(
    dataset: DetectionSet, detections: Sequence[Detections], label: int
) -> NDArray[np.float64]:
    """Match each detection of a class with the object that it overlaps most, the first if tied.

    Returns:
        (3, detections) by descending score: the overlap, or -1 if the image has no object of the
        class; whether the object is difficult; its number among the class's objects.
    """
    scores, rows, count = [np.zeros(0)], [np.zeros((3, 0))], 0
    for picture, detection in zip(dataset.pictures, detections, strict=True):
        has_label, is_object = detection.labels == label, picture.labels == label
        matches = np.array([[-1.0], [0.0], [-1.0]]).repeat(int(has_label.sum()), axis=1)
        if is_object.any() and has_label.any():
            boxes = (
                torch.from_numpy(x).double()
                for x in (detection.boxes[has_label], picture.boxes[is_object])
            )
            overlaps = box_iou(*boxes).nan_to_num().numpy()
            nearest = overlaps.argmax(axis=1)
            matches = np.stack(
                [overlaps.max(axis=1), picture.difficult[is_object][nearest], count + nearest]
            )
        scores.append(detection.scores[has_label])
        rows.append(matches)
        count += int(is_object.sum())
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return np.concatenate(rows, axis=1)[:, order]


def _average_precision(
    matches: NDArray[np.float64], threshold: float, object_count: int, rule: Rule
) -> float:
    """Return the average precision of a class at a threshold, from 0 to 1."""
    hit, ignored = matches[0] > threshold, matches[1] > 0
    is_correct = np.zeros(len(hit), bool)
    candidates = np.flatnonzero(hit & ~ignored)
    _, first = np.unique(matches[2, candidates], return_index=True)
    is_correct[candidates[first]] = True
    is_wrong = ~is_correct & ~(hit & ignored)
    correct_count, wrong_count = is_correct.cumsum(), is_wrong.cumsum()
    recall = correct_count / object_count
    precision = correct_count / np.maximum(correct_count + wrong_count, 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at this or a higher recall
    if rule == "11 points":
        places = np.searchsorted(recall, _POINTS)
        return float(np.append(best, 0.0)[places].sum() / len(_POINTS))
    return float((np.diff(recall, prepend=0.0) * best).sum())
