"""The photometric stage: colour jitter, gray, blur and normalisation of uint8 crops, in batches.

It runs where the model runs and is shared by all pipelines. Its operations are those that
torchvision performs on PIL images, roundings included. ``reference`` defines them; ``cpu`` and
``cuda`` are the same, fast, for one kind of device each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.draws import ViewParams

__all__ = ["normalized", "photometric"]


def photometric(
    crops: Tensor, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Turn the crops of N images into the two views that the model sees.

    Args:
        crops: (2, N, S, S, 3) uint8 RGB, any strides, on the training device.
        params: what to apply to each; the crop boxes and flips are taken as done.
        config: for the mean and standard deviation of the normalisation.
        dtype: of the result.

    Returns:
        Two tensors (N, 3, S, S) of ``dtype``, in channels-last memory format, normalised.
    """
    with span("photometric"):
        if crops.device.type == "cuda":
            from . import cuda

            return cuda.photometric(crops, params, config, dtype=dtype)
        if crops.device.type == "cpu":
            from . import cpu

            return cpu.photometric(crops, params, config, dtype=dtype)
        from . import reference

        return reference.photometric(crops, params, config, dtype=dtype)


def normalized(crops: Tensor, config: AugmentConfig) -> Tensor:
    """Normalise crops that go through nothing else, as evaluation's.

    Args:
        crops: (N, S, S, 3) uint8 RGB.
        config: for the mean and standard deviation.

    Returns:
        (N, 3, S, S) float32 on the crops' device, in channels-last memory format.
    """
    if crops.device.type == "cpu":
        from . import cpu

        return cpu.normalize(crops, config)
    from . import reference

    return reference.normalize(crops.permute(0, 3, 1, 2).float(), config)
