"""Transfer to object detection and segmentation: data sets, detectors, average precision."""

from .datasets import DetectionSet, Picture, Task, open_detection
from .scores import Detections, coco_scores, voc_scores

__all__ = [
    "DetectionSet",
    "Detections",
    "Picture",
    "Task",
    "coco_scores",
    "open_detection",
    "voc_scores",
]
