"""The photometric augmentations: jitter, gray, blur, solarise and normalisation of uint8 crops.

They run on the model's device and are shared by all pipelines. Results equal torchvision's on PIL
images, including rounding. ``operations`` selects the operations for each crop, ``reference``
implements them in torch, and ``cpu`` and ``cuda`` are fast implementations for one device type.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams

__all__ = ["normalize", "photometric"]


def photometric(
    crops: Crops, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Turn the crops of N images into augmented, normalised views, which the model takes as input.

    Args:
        crops: one tensor (V, N, S, S, 3) for each crop size, in the order of ``config.by_side``:
            uint8 RGB, any strides, on the training device.
        params: augmentation parameters; crop boxes and flips must already be applied.
        config: settings with the views' sizes and hue, and the mean and standard deviation.
        dtype: dtype of the views.

    Returns:
        The views in the order of ``config.views``: (N, 3, S, S) of ``dtype`` each, in channels-last
        memory format.
    """
    with span("photometric"):
        if crops[0].device.type == "cuda":
            from . import cuda

            return cuda.photometric(crops, params, config, dtype=dtype)
        from . import cpu

        return cpu.photometric(crops, params, config, dtype=dtype)


def normalize(
    crops: Tensor, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalise crops without augmentation, as in evaluations.

    Args:
        crops: (N, S, S, 3) uint8 RGB.
        config: settings with the mean and standard deviation.
        dtype: dtype of the result.

    Returns:
        (N, 3, S, S) of ``dtype`` on the crops' device, in channels-last memory format.
    """
    if crops.device.type == "cpu":
        from . import cpu

        return cpu.normalize(crops, config, dtype)
    from . import reference

    return reference.normalize(crops.permute(0, 3, 1, 2).float(), config).to(dtype)
