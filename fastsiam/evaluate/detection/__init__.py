"""Detection and segmentation: annotated pictures, average precision, pictures of what was found."""

from .annotations import DetectionSet, Picture, Segmentation, Task
from .scores import Detections, coco_scores, voc_ap50, voc_scores
from .tasks import open_detection

__all__ = [
    "DetectionSet",
    "Detections",
    "Picture",
    "Segmentation",
    "Task",
    "coco_scores",
    "open_detection",
    "voc_ap50",
    "voc_scores",
]
