"""The photometric operations of each crop, as arrays of parameters.

Views of the same size are in one tensor and are processed together. An implementation gets their
operations as arrays with one row per crop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Crops
from fastsiam.views.draws import HUE, NO_LEVEL, ViewParams

NOTHING = -1
"""Marks a slot without an operation in ``Operations.order``."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of M crops of the same size. All arrays are numpy, on the host."""

    order: NDArray[np.int8]
    """(M, 4): the jitter's operation in each slot, or ``NOTHING``."""
    factor: NDArray[np.float32]
    """(M, 4): factors of brightness, contrast and saturation, and the hue shift (in turns)."""
    gray: NDArray[np.bool_]
    """(M,): whether the crop is converted to gray, after the jitter."""
    blur: NDArray[np.float32]
    """(M,): sigma of the blur in pixels, applied after the conversion to gray; 0 means no blur."""
    solarise: NDArray[np.int16]
    """(M,): levels from this threshold on are inverted, after the blur; 256 inverts none."""

    @property
    def blurred(self) -> NDArray[np.int64]:
        """Indices of the crops to blur."""
        return np.flatnonzero(self.blur)

    @property
    def solarised(self) -> NDArray[np.int64]:
        """Indices of the crops to solarise."""
        return np.flatnonzero(self.solarise != NO_LEVEL)


def operations(params: ViewParams, config: AugmentConfig) -> list[Operations]:
    """Return the operations of the views of each size, in the order of ``config.by_side``.

    A view whose hue setting is 0 skips the conversion to HSV, whose rounding would change pixels.
    torchvision's ``ColorJitter`` does the same.
    """
    no_hue = np.array([view.hue == 0 for view in config.views])[:, None, None]
    idle = ~params.jitter[..., None] | (no_hue & (params.order == HUE))
    params = replace(params, order=np.where(idle, np.int8(NOTHING), params.order))
    sides = []
    for numbers in config.by_side.values():
        view_params = params.views(numbers)
        columns = (getattr(view_params, name) for name in Operations.__slots__)
        sides.append(Operations(*(x.reshape(-1, *x.shape[2:]) for x in columns)))
    return sides


Finish = Callable[[Tensor, Operations, AugmentConfig, torch.dtype], Tensor]
"""Function that turns crops (M, S, S, 3) uint8 into views (M, 3, S, S), channels-last."""


def augment_by_size(
    finish: Finish,
    crops: Crops,
    params: ViewParams,
    config: AugmentConfig,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """Augment the crops of each size with ``finish``, and return the views in order.

    The other arguments are those of ``fastsiam.views.photometric.photometric``.
    """
    outputs = [
        finish(tensor.flatten(0, 1), side_operations, config, dtype)
        for tensor, side_operations in zip(crops, operations(params, config), strict=True)
    ]
    return split_by_view(outputs, config)


def split_by_view(tensors: list[Tensor], config: AugmentConfig) -> tuple[Tensor, ...]:
    """Split tensors by size into tensors by view.

    Args:
        tensors: one tensor (V * N, ...) for each size of ``config.by_side``.
        config: settings that list the views of each size.

    Returns:
        The views (N, ...) in the order of ``config.views``.
    """
    views: dict[int, Tensor] = {}
    for tensor, numbers in zip(tensors, config.by_side.values(), strict=True):
        views |= dict(zip(numbers, tensor.chunk(len(numbers)), strict=True))
    return tuple(views[number] for number in sorted(views))
