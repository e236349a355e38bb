"""Average precision of detections: VOC's two rules, and COCO's.

The figures beside the papers' rows for VOC are those of ``voc_scores``: detectron2's evaluation,
with which MoCo and SimSiam were measured, takes VOC's own rule of eleven points for the 2007 test
set at overlaps of 0.50, 0.55, ... 0.95, and calls their mean AP. It rounds scores to three decimals
and boxes to one; here nothing is rounded.
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

from fastsiam.errors import DataError

from .dataset import DetectionSet, Picture, Segmentation
from .masks import coco_tools, run_lengths

Rule = Literal["11 points", "area"]
"""How VOC makes one figure of precision and recall: the mean of the precisions at recalls 0, 0.1,
... 1 (until 2009), or the area under the curve (since 2010)."""

OVERLAPS = tuple(percent / 100 for percent in range(50, 100, 5))
"""Overlaps (intersection over union) that AP is the mean over."""

_POINTS = np.arange(0.0, 1.1, 0.1)
"""Recalls of the eleven points, with the rounding that detectron2's have: 0.30000000000000004."""

_SUMMARY = {
    "AP": 0, "AP50": 1, "AP75": 2, "APs": 3, "APm": 4, "APl": 5,
    "AR1": 6, "AR10": 7, "AR100": 8, "ARs": 9, "ARm": 10, "ARl": 11,
}  # fmt: skip
"""Where pycocotools has COCO's figures."""


@dataclass(frozen=True)
class Detections:
    """What was found in one image: n objects, in any order."""

    image_id: int
    """``Picture.image_id`` of the image."""
    boxes: NDArray[np.float32]
    """(n, 4) x0, y0, x1, y1 in the image's own pixels, as a picture's boxes are."""
    scores: NDArray[np.float32]
    """(n,) the higher, the surer."""
    labels: NDArray[np.int64]
    """(n,) positions among the data set's classes."""
    masks: tuple[Segmentation, ...] | None = None
    """(n,) run lengths or polygons of the image's own size; None without masks."""


def voc_scores(
    dataset: DetectionSet, detections: Sequence[Detections], rule: Rule = "11 points"
) -> dict[str, float]:
    """Return AP, AP50 and AP75 in percent as detectron2 measures them on VOC, means over classes.

    Of the two rules detectron2 takes "11 points" for the 2007 test set, "area" for 2012.

    A detection counts as right if, among the objects of its class in its image, the one that it
    overlaps most it overlaps by more than the threshold, and no surer detection took that one.
    One of a difficult object counts as nothing. Detections of the same score stay in the order
    that they are given in. Classes without any object, difficult ones apart, are left out.

    Raises:
        DataError: the set has no object to be found, or a detection is of another image or class.
    """
    pictures = {picture.image_id: picture for picture in _checked(dataset, detections)}
    rows = []
    for label in range(len(dataset.classes)):
        wanted = sum(
            int(((picture.labels == label) & ~picture.difficult & ~picture.crowd).sum())
            for picture in pictures.values()
        )
        if wanted:
            matches = _matches(pictures, detections, label)
            rows.append([_average(*_curve(matches, least, wanted), rule) for least in OVERLAPS])
    mean = 100 * np.array(rows).mean(axis=0)
    return {"AP": float(mean.mean()), "AP50": float(mean[0]), "AP75": float(mean[5])}


def coco_scores(
    dataset: DetectionSet,
    detections: Sequence[Detections],
    kind: Literal["bbox", "segm"] = "bbox",
) -> dict[str, float]:
    """Return COCO's figures in percent, as pycocotools measures them.

    Args:
        dataset: the truth. Difficult objects count as crowds.
        detections: of its images.
        kind: "bbox" compares boxes, "segm" masks.

    Returns:
        AP, AP50, AP75; APs, APm, APl of small, medium and large objects; AR1, AR10, AR100, and
        ARs, ARm, ARl: the recalls. What the set has no objects for is left out.

    Raises:
        DataError: the set has no object to be found or no masks, or a detection is of another image
            or class, or has no mask.
        BackendError: pycocotools is missing.
    """
    pictures = _checked(dataset, detections)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = _evaluation(pictures, detections, kind, len(dataset.classes))
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = {name: float(evaluation.stats[place]) for name, place in _SUMMARY.items()}
    return {name: 100 * value for name, value in figures.items() if value >= 0}


def _checked(dataset: DetectionSet, detections: Sequence[Detections]) -> list[Picture]:
    """Return the pictures of a set that has objects, and of which the detections are."""
    pictures = dataset.pictures()
    if not any((~picture.difficult & ~picture.crowd).any() for picture in pictures):
        raise DataError(f"{dataset.name} has no object to be found: there is nothing to measure")
    known = {picture.image_id for picture in pictures}
    seen: set[int] = set()
    for found in detections:
        if found.image_id not in known:
            raise DataError(
                f"{dataset.name} has no image {found.image_id}, of which detections are"
            )
        if found.image_id in seen:
            raise DataError(f"image {found.image_id} has detections twice; join them")
        seen.add(found.image_id)
        counts = {len(found.boxes), len(found.scores), len(found.labels)}
        if len(counts) > 1:
            raise DataError(f"image {found.image_id}: boxes, scores and labels differ in number")
        outside = (found.labels < 0) | (found.labels >= len(dataset.classes))
        if outside.any():
            raise DataError(
                f"image {found.image_id}: a detection has the label {found.labels[outside][0]}, "
                f"but {dataset.name} has {len(dataset.classes)} classes"
            )
        if not (np.isfinite(found.boxes).all() and np.isfinite(found.scores).all()):
            raise DataError(f"image {found.image_id}: a detection's box or score is not finite")
    return pictures


@dataclass(frozen=True)
class _Matches:
    """The detections of one class, the surest first, each with the object it overlaps most."""

    overlap: NDArray[np.float64]
    """(detections,) -1 where the image has no object of the class."""
    ignored: NDArray[np.bool_]
    """(detections,) whether that object counts as nothing."""
    object: NDArray[np.int64]
    """(detections,) a number of that object, of which no two have the same."""


def _matches(
    pictures: dict[int, Picture], detections: Sequence[Detections], label: int
) -> _Matches:
    """Find the object that each detection of a class overlaps most, the first of several such."""
    scores, overlap, ignored, objects = [], [], [], []
    count = 0
    for found in detections:
        own = found.labels == label
        picture = pictures[found.image_id]
        there = picture.labels == label
        scores.append(found.scores[own])
        if there.any():
            boxes = (found.boxes[own], picture.boxes[there])
            all_overlaps = box_iou(*(torch.from_numpy(x).double() for x in boxes)).nan_to_num()
            all_overlaps = all_overlaps.numpy()
            most = all_overlaps.argmax(axis=1)
            overlap.append(all_overlaps.max(axis=1))
            ignored.append((picture.difficult | picture.crowd)[there][most])
            objects.append(count + most)
            count += int(there.sum())
        else:
            overlap.append(np.full(int(own.sum()), -1.0))
            ignored.append(np.zeros(int(own.sum()), bool))
            objects.append(np.full(int(own.sum()), -1))
    if not scores:
        return _Matches(np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return _Matches(
        np.concatenate(overlap)[order],
        np.concatenate(ignored)[order],
        np.concatenate(objects).astype(np.int64)[order],
    )


def _curve(
    matches: _Matches, least: float, wanted: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return recall and precision after each detection, the surest first."""
    hit = matches.overlap > least
    right = np.zeros(len(hit), bool)
    candidates = np.flatnonzero(hit & ~matches.ignored)
    _, first = np.unique(matches.object[candidates], return_index=True)
    right[candidates[first]] = True
    wrong = ~right & ~(hit & matches.ignored)
    found, false = right.cumsum(), wrong.cumsum()
    return found / wanted, found / np.maximum(found + false, 1)


def _average(recall: NDArray[np.float64], precision: NDArray[np.float64], rule: Rule) -> float:
    """Return the average precision of a curve, 0 to 1."""
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at this recall or a higher one
    if rule == "11 points":
        places = np.searchsorted(recall, _POINTS)
        return float(np.append(best, 0.0)[places].sum() / len(_POINTS))
    return float((np.diff(recall, prepend=0.0) * best).sum())


def _evaluation(
    pictures: list[Picture],
    detections: Sequence[Detections],
    kind: Literal["bbox", "segm"],
    classes: int,
) -> Any:
    """Give pycocotools the truth and the detections; return its evaluation, not yet run."""
    coco, evaluate = coco_tools("coco"), coco_tools("cocoeval")
    sizes = {picture.image_id: (picture.height, picture.width) for picture in pictures}
    objects = [row for picture in pictures for row in _objects(picture, kind)]
    rows = [row for one in detections for row in _found(one, kind, *sizes[one.image_id])]
    truth = coco.COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": key, "height": h, "width": w} for key, (h, w) in sizes.items()],
        "categories": [{"id": label} for label in range(classes)],
        "annotations": [row | {"id": number} for number, row in enumerate(objects, 1)],
    }
    truth.createIndex()
    found = truth.loadRes(rows) if rows else coco.COCO()
    return evaluate.COCOeval(truth, found, kind)


def _objects(picture: Picture, kind: str) -> list[dict[str, Any]]:
    """Return a picture's objects as COCO's annotations."""
    if kind == "segm" and picture.masks is None and len(picture):
        raise DataError(f"{picture.file} has no masks to compare with")
    return [
        {
            "image_id": picture.image_id,
            "category_id": int(picture.labels[i]),
            "bbox": _as_coco(picture.boxes[i]),
            "area": float(picture.areas[i]),
            "iscrowd": int(picture.crowd[i] or picture.difficult[i]),
        }
        | _mask(picture.masks, i, kind, picture.height, picture.width)
        for i in range(len(picture))
    ]


def _found(found: Detections, kind: str, height: int, width: int) -> list[dict[str, Any]]:
    """Return an image's detections as COCO's results, with what their sizes go by alone."""
    if kind == "segm" and found.masks is None and len(found.scores):
        raise DataError(f"the detections in image {found.image_id} have no masks to compare")
    return [
        {
            "image_id": found.image_id,
            "category_id": int(found.labels[i]),
            "score": float(found.scores[i]),
        }
        | (
            _mask(found.masks, i, kind, height, width)
            if kind == "segm"
            else {"bbox": _as_coco(found.boxes[i])}
        )
        for i in range(len(found.scores))
    ]


def _mask(
    masks: tuple[Segmentation, ...] | None, place: int, kind: str, height: int, width: int
) -> dict[str, Any]:
    """Return what COCO's annotation says of a mask, nothing where boxes are compared."""
    if kind != "segm" or masks is None:
        return {}
    return {"segmentation": run_lengths(masks[place], height, width)}


def _as_coco(box: NDArray[np.float32]) -> list[float]:
    """Return a box as COCO writes it: x, y, width, height."""
    x0, y0, x1, y1 = map(float, box)
    return [x0, y0, x1 - x0, y1 - y0]
