"""The geometric stage for images that are decoded: cut both crops, resize as PIL does, flip.

``cpu`` and ``cuda`` do the same for one kind of device each. The torchvision pipeline leaves this
to PIL, and the DALI pipeline to DALI.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.augment import ViewParams
from fastsiam.trace import span


def crop_views(
    pixels: Tensor, start: NDArray[np.int64], size: NDArray[np.int64], params: ViewParams, side: int
) -> Tensor:
    """Cut both crops of N images, resize and flip them.

    Args:
        pixels: (bytes,) uint8: images one after the other, each H x W x 3, on a CPU or a CUDA GPU.
        start: (N,) where each of the images begins.
        size: (N, 2) height and width of each.
        params: crop boxes and flips of the N images.
        side: of the result, in pixels.

    Returns:
        (2, N, side, side, 3) uint8 on the pixels' device.
    """
    with span("crop"):
        if pixels.device.type == "cuda":
            from . import cuda

            return cuda.crop_views(pixels, start, size, params, side)
        from . import cpu

        return cpu.crop_views(pixels, start, size, params, side)
