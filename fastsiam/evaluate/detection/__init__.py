"""Detection and segmentation: annotated pictures, average precision, pictures of what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fastsiam.errors import DataError
from fastsiam.files import explained

from .coco import open_coco
from .dataset import DetectionSet, Picture, Segmentation, Task
from .scores import Detections, coco_scores, voc_scores
from .voc import open_voc

__all__ = [
    "DetectionSet",
    "Detections",
    "Picture",
    "Segmentation",
    "Task",
    "coco_scores",
    "open_detection",
    "voc_scores",
]

_TRAINING = {"voc07": [(2007, "trainval")], "voc0712": [(2007, "trainval"), (2012, "trainval")]}


def open_detection(task: Task, data: Path, split: Literal["train", "val"]) -> DetectionSet:
    """Open a split of a task: all its annotations are read and checked.

    Args:
        task: what the split is of; ``Task`` lists the splits.
        data: the folder of the data set's own folders or zips (``open_voc``, ``open_coco``).
        split: "train", or "val", which is VOC's test2007 or COCO's val2017.

    Raises:
        NoSplitError: the split is not there; says what was looked for.
        DataError: an annotation or an image is missing or bad; one line names it.
    """
    with explained(DataError, f"cannot open the data at {data}"):
        if not data.exists():
            raise DataError(f"no data at {data}: name the folder of {task}'s folders or archives")
        data = data.parent if data.is_file() else data
        if task == "coco":
            return open_coco(data, f"{split}2017")
        return open_voc(data, _TRAINING[task] if split == "train" else [(2007, "test")])
