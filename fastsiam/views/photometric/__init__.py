"""The photometric augmentations: jitter, gray, blur, solarise and normalisation of uint8 crops.

They run on the model's device and are shared by all pipelines. Results equal those of torchvision
on PIL images, including rounding. ``operations`` selects the operations of each crop, ``reference``
defines them, and ``cpu`` and ``cuda`` are fast implementations for one type of device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams

__all__ = ["normalized", "photometric"]


def photometric(
    crops: Crops, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Turn the crops of N images into the views that the model sees.

    Args:
        crops: one tensor (V, N, S, S, 3) for each side of the views, in the order of
            ``config.by_side``: uint8 RGB, any strides, on the training device.
        params: parameters of each view; crop boxes and flips must be applied already.
        config: for the views' sides and hue settings, and the normalisation constants.
        dtype: of the result.

    Returns:
        The views in the order of ``config.views``: (N, 3, S, S) of ``dtype`` each, in channels-last
        memory format, normalised.
    """
    with span("photometric"):
        if crops[0].device.type == "cuda":
            from . import cuda

            return cuda.photometric(crops, params, config, dtype=dtype)
        from . import cpu

        return cpu.photometric(crops, params, config, dtype=dtype)


def normalized(
    crops: Tensor, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalise crops without augmentation, such as those of evaluations.

    Args:
        crops: (N, S, S, 3) uint8 RGB.
        config: for the mean and standard deviation.
        dtype: of the result.

    Returns:
        (N, 3, S, S) of ``dtype`` on the crops' device, in channels-last memory format.
    """
    if crops.device.type == "cpu":
        from . import cpu

        return cpu.normalize(crops, config, dtype)
    from . import reference

    return reference.normalize(crops.permute(0, 3, 1, 2).float(), config).to(dtype)
