"""A tiny detection set in memory, whose one object's colour is its class, and a tiny detector."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from fastsiam.evaluate.detection import DetectionSet, Picture
from fastsiam.evaluate.detection.model import build_detector
from fastsiam.model.backbones import ResNet

SIDE = 64


class Squares(DetectionSet):
    """Images of one coloured square each; the last has no object."""

    name = "squares"
    classes = ("red", "green")

    def __init__(self, images: int = 6, *, masks: bool = False) -> None:
        generator = np.random.default_rng(0)
        self._corners = generator.integers(0, SIDE - 32, (images, 2))
        self._masks = masks

    def __len__(self) -> int:
        return len(self._corners) + 1

    def picture(self, index: int) -> Picture:
        there = int(index < len(self._corners))
        x, y = map(int, self._corners[index]) if there else (0, 0)
        boxes = np.array([[x, y, x + 32, y + 32]] * there, np.float32).reshape(-1, 4)
        outline = np.array([x, y, x + 32, y, x + 32, y + 32, x, y + 32], np.float64)
        return Picture(
            file=f"{index}.png",
            height=SIDE,
            width=SIDE,
            boxes=boxes,
            labels=np.array([index % 2] * there, np.int64),
            difficult=np.zeros(there, bool),
            crowd=np.zeros(there, bool),
            areas=np.full(there, 1024.0, np.float32),
            masks=([outline],) * there if self._masks else None,
            image_id=index + 10,
        )

    def read(self, index: int) -> bytes:
        image = np.full((SIDE, SIDE, 3), 128, np.uint8)
        if index < len(self._corners):
            x, y = self._corners[index]
            image[y : y + 32, x : x + 32] = (255, 0, 0) if index % 2 == 0 else (0, 255, 0)
        out = io.BytesIO()
        Image.fromarray(image).save(out, "png")
        return out.getvalue()


def tiny(masks: bool = False, *, kind: Any = "c4") -> Any:
    """Build a detector of three classes' worth of heads on a narrow ResNet."""
    torch.manual_seed(0)
    return build_detector(
        ResNet("resnet10", stem="imagenet", width=8),
        kind=kind,
        classes=2,
        masks=masks,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        rois=16,
    )
