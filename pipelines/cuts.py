"""Crop geometry: a box in the image, its size after resizing, and the square to cut from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams


@dataclass(frozen=True, slots=True)
class Cuts:
    """V crops of each of N images: a box of the image is resized, then a square is cut out.

    All arrays are numpy, on the host.
    """

    box: NDArray[np.int32]
    """(V, N, 4): top, left, height, width in pixels of the image. Other pixels are not used."""
    flip: NDArray[np.bool_]
    """(V, N): whether to mirror the crop left to right."""
    resized: NDArray[np.int32]
    """(V, N, 2): height and width of the resized box."""
    corner: NDArray[np.int32]
    """(V, N, 2): top and left of the square in the resized box; pixels outside are black."""


def cut_views(params: ViewParams, config: AugmentConfig) -> tuple[Cuts, ...]:
    """Return the cuts for the views of N images.

    Returns:
        For each side of ``config.by_side``, the boxes of its views, resized to side x side pixels.
    """
    sides = []
    for side, numbers in config.by_side.items():
        view_params = params.views(numbers)
        resized = np.full((*view_params.flip.shape, 2), side, np.int32)
        sides.append(Cuts(view_params.box, view_params.flip, resized, np.zeros_like(resized)))
    return tuple(sides)


def cut_centres(size: NDArray[np.int64], *, resize: int, side: int) -> Cuts:
    """Return the cuts for central crops of N images, with torchvision's rounding.

    Args:
        size: (N, 2) height and width of each image.
        resize: shorter side after resizing, as in ``Resize(resize)``.
        side: side of the crop, as in ``CenterCrop(side)``; a smaller image gets a black border.
    """
    short, long = size.min(1), size.max(1)
    resized = np.where(size > short[:, None], (resize * long / short)[:, None], resize)
    resized = resized.astype(np.int32)
    excess = resized - side
    corner = np.where(excess < 0, -(-excess // 2), np.rint(excess / 2)).astype(np.int32)
    box = np.concatenate([np.zeros_like(size), size], axis=1).astype(np.int32)
    return Cuts(box[None], np.zeros((1, len(size)), np.bool_), resized[None], corner[None])
