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
from torchvision.ops import box_iou

from .datasets import DetectionSet, Picture

Rule = Literal["11 points", "area"]
"""How VOC averages precision over recall: the mean precision at recalls 0, 0.1, ... 1 (until 2009),
or the area under the curve (since 2010)."""

OVERLAPS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Overlap thresholds (intersection over union) over which AP is the mean."""

_POINTS = np.arange(0.0, 1.1, 0.1)
"""Recalls of the eleven points, with the rounding errors of detectron2's: 0.30000000000000004."""


@dataclass(frozen=True)
class Detections:
    """The n objects detected in one image, in any order."""

    image_id: int
    """``Picture.image_id`` of the image."""
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
        detections: detections in the data set's images, at most one entry for each image.
        rule: how the precision-recall curve is averaged.

    Raises:
        DataError: all objects in the data set are difficult, or it has none.
    """
    dataset.check_has_objects()
    pictures = {picture.image_id: picture for picture in dataset.pictures}
    counted_labels = np.concatenate([one.labels[~one.difficult] for one in dataset.pictures])
    rows = []
    for label in range(len(dataset.classes)):
        if object_count := int((counted_labels == label).sum()):
            matches = _matches(pictures, detections, label)
            rows.append(
                [
                    _average(*_curve(matches, threshold, object_count), rule)
                    for threshold in OVERLAPS
                ]
            )
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
        detections: detections in the data set's images.
        kind: "bbox" compares boxes, "segm" masks.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    categories = sorted(dataset.coco.cats)
    rows = [
        {
            "image_id": one.image_id,
            "category_id": categories[one.labels[i]],
            "score": float(one.scores[i]),
        }
        | ({"segmentation": one.masks[i]} if kind == "segm" else {"bbox": _as_coco(one.boxes[i])})
        for one in detections
        for i in range(len(one.scores))
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
    pictures: dict[int, Picture], detections: Sequence[Detections], label: int
) -> NDArray[np.float64]:
    """Match each detection of a class with the object that it overlaps most, the first if tied.

    Returns:
        (3, detections) by descending score: the overlap, or -1 if the image has no object of the
        class; whether the object is difficult; its number among the class's objects in images with
        detections.
    """
    scores, rows, count = [np.zeros(0)], [np.zeros((3, 0))], 0
    for detection in detections:
        has_label, picture = detection.labels == label, pictures[detection.image_id]
        is_object = picture.labels == label
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


def _curve(
    matches: NDArray[np.float64], threshold: float, object_count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return recall and precision after each detection, in the order of ``matches``."""
    hit, ignored = matches[0] > threshold, matches[1] > 0
    is_correct = np.zeros(len(hit), bool)
    candidates = np.flatnonzero(hit & ~ignored)
    _, first = np.unique(matches[2, candidates], return_index=True)
    is_correct[candidates[first]] = True
    is_wrong = ~is_correct & ~(hit & ignored)
    correct_count, wrong_count = is_correct.cumsum(), is_wrong.cumsum()
    return correct_count / object_count, correct_count / np.maximum(correct_count + wrong_count, 1)


def _average(recall: NDArray[np.float64], precision: NDArray[np.float64], rule: Rule) -> float:
    """Return the average precision of a curve, from 0 to 1."""
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at this or a higher recall
    if rule == "11 points":
        places = np.searchsorted(recall, _POINTS)
        return float(np.append(best, 0.0)[places].sum() / len(_POINTS))
    return float((np.diff(recall, prepend=0.0) * best).sum())


def _as_coco(box: NDArray[np.float32]) -> list[float]:
    """Convert a box to COCO's format: x, y, width, height."""
    x0, y0, x1, y1 = map(float, box)
    return [x0, y0, x1 - x0, y1 - y0]
