"""Pictures of what was found in images, beside what is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor, resize_mask, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from fastsiam.report.drawing import BLUE, GRAY, GREEN, ORANGE, PINK, SKY, VERMILION
from fastsiam.report.pictures import Captioned

from .dataset import Picture, Segmentation
from .masks import pixels
from .scores import Detections

SIDE = 320
"""Pixels of the longer side of an image as it is drawn."""
_LEAST = 0.5
"""Scores from which on detections are drawn."""
_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY)
"""Of the classes, one after the other, and again from the first."""
_OPACITY = 0.35


def draw(
    image: Image.Image, truth: Picture, detections: Detections, *, classes: Sequence[str]
) -> list[Captioned]:
    """Draw an image with its objects, and with the detections of a score of 0.5 or more.

    Difficult objects and crowds are gray. A colour is a class's.

    Args:
        image: of the size that the truth says.
        truth: its objects.
        detections: in it.
        classes: names for the texts.

    Raises:
        BackendError: there are masks, and pycocotools is missing.
    """
    ignored = truth.difficult | truth.crowd
    texts = [
        classes[label] + " (ignored)" * gray
        for label, gray in zip(truth.labels.tolist(), ignored.tolist(), strict=True)
    ]
    colours = [
        GRAY if gray else _colour(label) for label, gray in zip(truth.labels, ignored, strict=True)
    ]
    order = [i for i in np.argsort(detections.scores) if detections.scores[i] >= _LEAST]
    labels = detections.labels[order]
    named = [
        f"{classes[label]} {score:.2f}"
        for label, score in zip(labels, detections.scores[order], strict=True)
    ]
    masks = None if detections.masks is None else [detections.masks[i] for i in order]
    boxes, found = detections.boxes[order], list(map(_colour, labels))
    return [
        (_drawn(image, truth.boxes, texts, colours, truth.masks), f"truth: {len(texts)}", None),
        (_drawn(image, boxes, named, found, masks), f"found: {len(named)}", None),
    ]


def _drawn(
    image: Image.Image,
    boxes: NDArray[np.float32],
    texts: list[str],
    colours: list[str],
    masks: Sequence[Segmentation] | None,
) -> Image.Image:
    scale = SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    canvas = pil_to_tensor(image.convert("RGB").resize((width, height), method))
    if not texts:
        return image.convert("RGB").resize((width, height), method)
    if masks:
        covered = np.stack([pixels(mask, image.height, image.width) for mask in masks])
        resized = resize_mask(torch.from_numpy(covered).to(torch.uint8), [height, width])
        canvas = draw_segmentation_masks(canvas, resized.bool(), alpha=_OPACITY, colors=colours)
    canvas = draw_bounding_boxes(
        canvas,
        torch.from_numpy(boxes) * scale,
        texts,
        colours,
        width=2,
        label_colors="white",
        label_background_colors=colours,
        fill_labels=True,
    )
    drawn: Image.Image = to_pil_image(canvas)
    return drawn


def _colour(label: int) -> str:
    return _COLOURS[label % len(_COLOURS)]
