"""Boxes, sizes and flips of crops, and crops of images that are decoded already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams


@dataclass(frozen=True, slots=True)
class Cuts:
    """V crops of each of N images: a box of the image is resized, and a square is cut out of that.

    All arrays are numpy, on the host.
    """

    box: NDArray[np.int32]
    """(V, N, 4): top, left, height, width in pixels of the image. The filter sees no others."""
    flip: NDArray[np.bool_]
    """(V, N): mirror the crop left to right."""
    resized: NDArray[np.int32]
    """(V, N, 2): height and width that the box gets."""
    corner: NDArray[np.int32]
    """(V, N, 2): top and left of the square in the resized box; what lies outside that is black."""


def cut_views(params: ViewParams, config: AugmentConfig) -> tuple[Cuts, ...]:
    """Return the views of N images as cuts, of one side after the other.

    Returns:
        For each side of ``config.by_side`` the boxes of its views, resized to that many pixels
        square.
    """
    sides = []
    for side, numbers in config.by_side.items():
        own = params.views(numbers)
        resized = np.full((*own.flip.shape, 2), side, np.int32)
        sides.append(Cuts(own.box, own.flip, resized, np.zeros_like(resized)))
    return tuple(sides)


def cut_centres(size: NDArray[np.int64], *, resize: int, side: int) -> Cuts:
    """Return the central crops of N images as cuts, with torchvision's roundings.

    Args:
        size: (N, 2) height and width of each image.
        resize: what its shorter side becomes, as in ``Resize(resize)``.
        side: of the result, as in ``CenterCrop(side)``; a smaller image gets a black border.
    """
    short, long = size.min(1), size.max(1)
    resized = np.where(size > short[:, None], (resize * long / short)[:, None], resize)
    resized = resized.astype(np.int32)
    excess = resized - side
    corner = np.where(excess < 0, -(-excess // 2), np.rint(excess / 2)).astype(np.int32)
    box = np.concatenate([np.zeros_like(size), size], axis=1).astype(np.int32)
    return Cuts(box[None], np.zeros((1, len(size)), np.bool_), resized[None], corner[None])


def crop_views(
    pixels: Tensor,
    start: NDArray[np.int64],
    size: NDArray[np.int64],
    params: ViewParams,
    config: AugmentConfig,
) -> Crops:
    """Cut the crops of N images, resize and flip them.

    Args:
        pixels: (bytes,) uint8: images one after the other, each H x W x 3, on a CPU or a CUDA GPU.
        start: (N,) where each of the images begins.
        size: (N, 2) height and width of each.
        params: crop boxes and flips of the N images.
        config: says which views have which side.

    Returns:
        The crops on the pixels' device.
    """
    with span("crop"):
        if pixels.device.type == "cuda":
            from .crop_kernels import crop_side
        else:
            from .job import crop_side
        cuts = cut_views(params, config)
        return tuple(
            crop_side(pixels, start, size, own, side)
            for own, side in zip(cuts, config.by_side, strict=True)
        )
