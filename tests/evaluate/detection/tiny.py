"""A tiny detection set of single objects classified by colour, a detector and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fastsiam.config.detect import DetectConfig
from fastsiam.evaluate.detection import DetectionSet, Picture
from fastsiam.evaluate.detection.detectors import build_detector
from fastsiam.model.backbones import ResNet

SIDE = 64
QUICK = DetectConfig(
    trials=1,
    steps=3,
    warmup=1,
    batch_size=2,
    short_side="64",
    long_side=96,
    rois=8,
    precise_bn=1,
    workers=1,
    device="cpu",
)


def picture(
    boxes: Any, labels: Any = None, *, difficult: Any = (), file: Any = Path("a")
) -> Picture:
    """Build a picture; ``difficult`` are the indices of difficult boxes."""
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    return Picture(
        file=file,
        height=SIDE,
        width=SIDE,
        boxes=corners,
        labels=np.array([0] * len(corners) if labels is None else labels, np.int64),
        difficult=np.isin(np.arange(len(corners)), np.array(difficult)),
    )


def squares(folder: Path, images: int = 6) -> DetectionSet:
    """Write images with one coloured square each, and a last one without objects."""
    corners = np.random.default_rng(0).integers(0, SIDE - 32, (images, 2))
    pictures = []
    for index in range(images + 1):
        pixels, boxes = np.full((SIDE, SIDE, 3), 128, np.uint8), []
        if index < images:
            x, y = map(int, corners[index])
            pixels[y : y + 32, x : x + 32] = (0, 255, 0) if index % 2 else (255, 0, 0)
            boxes = [[x, y, x + 32, y + 32]]
        file = folder / f"{index}.png"
        Image.fromarray(pixels).save(file)
        pictures.append(picture(boxes, [index % 2] * len(boxes), file=file))
    return DetectionSet("squares", ("red", "green"), pictures)


def tiny(classes: int = 2, *, masks: bool = False, kind: Any = "c4", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = DetectConfig(detector=kind, task="coco" if masks else "voc07", rois=16)
    backbone = ResNet("resnet10", stem=settings.pop("stem", "imagenet"), width=8)
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    return build_detector(backbone, config, classes=classes, mean=mean, std=std, **settings)
