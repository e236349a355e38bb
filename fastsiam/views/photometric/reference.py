"""Reference implementation of the photometric augmentations, in torch, on any device.

The operations are torchvision's for PIL images, with separate parameters for each image of a batch.
PIL works in uint8 and truncates after every operation. So does the reference: on the CPU every
operation is bit-identical to PIL (tests/views). The fast implementations are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import to_device
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION

from .operations import Operations, augment_by_size


@torch.no_grad()
def _finish(
    crops: Tensor, operations: Operations, config: AugmentConfig, dtype: torch.dtype
) -> Tensor:
    """Augment crops of the same size; see ``operations.Finish``."""
    images = crops.permute(0, 3, 1, 2)
    x = images.to(torch.float32, memory_format=torch.contiguous_format)

    def change(rows: NDArray[np.int64], operation: Callable[..., Tensor], *arguments: Any) -> None:
        if len(rows):
            index = to_device(rows, x.device)
            row_arguments = (
                value[index] if isinstance(value, Tensor) else value[rows] for value in arguments
            )
            x.index_copy_(0, index, operation(x[index], *row_arguments))

    factor = to_device(operations.factor, x.device)
    for slot in range(4):
        for op, operation in _JITTER.items():
            change(np.flatnonzero(operations.order[:, slot] == op), operation, factor[:, op])
    change(np.flatnonzero(operations.gray), grayscale)
    change(operations.blurred, gaussian_blur, operations.blur)
    change(operations.solarised, solarise, to_device(operations.solarise, x.device))
    return normalize(x, config).to(dtype, memory_format=torch.channels_last)


photometric = partial(augment_by_size, _finish)
"""Reference implementation of ``fastsiam.views.photometric.photometric``."""


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with black.

    All jitter operations take x (M, 3, H, W) with integers from 0 to 255, and factor (M,).
    """
    return _blend(torch.zeros((), device=x.device), x, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean luma, rounded to an integer like PIL."""
    mean = _luma(x).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64)
    return _blend((mean + 0.5).floor().float(), x, factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grayscale image."""
    return _blend(_luma(x), x, factor)


def adjust_hue(x: Tensor, factor: Tensor) -> Tensor:
    """Shift the hue by ``factor`` turns, in PIL's HSV with its 256 levels per channel."""
    r, g, b = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    safe = chroma.clamp(min=1)
    rc, gc, bc = (value - r) / safe, (value - g) / safe, (value - b) / safe
    rc, gc, bc = rc.double(), gc.double(), bc.double()  # PIL mixes float and double
    hue = torch.where(
        r == value, bc - gc, torch.where(g == value, 2 + rc - bc, 4 + gc - rc)
    ).float()
    hue = torch.remainder(hue.double() / 6 + 1, 1).float()
    hue = torch.where(chroma == 0, 0, torch.floor(hue.double() * 255))
    saturation = torch.floor((chroma / value.clamp(min=1)).double() * 255)
    shift = (factor.double() * 255).trunc().view(-1, 1, 1)
    sextant = torch.remainder(hue + shift, 256) * 6 / 255
    i = torch.floor(sextant)
    f, s = (sextant - i).float().double(), (saturation / 255).float().double()
    p = torch.floor(value * (1 - s) + 0.5).float()
    q = torch.floor(value * (1 - s * f) + 0.5).float()
    t = torch.floor(value * (1 - s * (1 - f)) + 0.5).float()
    table = torch.stack(
        [value, q, p, p, t, value, t, value, value, q, p, p, p, p, t, value, value, q]
    )
    sector = torch.remainder(i, 6).long()
    channel = torch.arange(3, device=x.device).view(1, 3, 1, 1) * 6 + sector.unsqueeze(1)
    return table.transpose(0, 1).gather(1, channel)


_JITTER = {
    BRIGHTNESS: adjust_brightness,
    CONTRAST: adjust_contrast,
    SATURATION: adjust_saturation,
    HUE: adjust_hue,
}


def grayscale(x: Tensor) -> Tensor:
    """Replace all three channels by their ITU-R 601-2 luma; x is (M, 3, H, W), integers 0-255."""
    return _luma(x).expand_as(x)


def gaussian_blur(x: Tensor, sigma: np.ndarray) -> Tensor:
    """Blur like PIL's ``ImageFilter.GaussianBlur(sigma)``: three box blurs along each axis.

    Args:
        x: (M, 3, H, W) integers from 0 to 255.
        sigma: (M,) on the host, in pixels, above 0.

    Each pass is a box filter of fractional length with replicated edges, rounded to integers.
    Lengths are by Gwosdek et al., "Theoretical foundations of Gaussian convolution by extended box
    filtering" (SSVM 2011), equations 7, 11 and 14. PIL's weights are integers in units of 2**-24,
    so its sums are integers below 2**33, which float64 represents exactly.
    """
    inner, outer, radius = box_weights(np.asarray(sigma, np.float32))
    reach = int(radius.max()) + 1
    offset = np.abs(np.arange(-reach, reach + 1))
    taps = np.where(offset <= radius[:, None], inner[:, None], 0.0)
    taps += np.where(offset == radius[:, None] + 1, outer[:, None], 0.0)
    weights = to_device(taps, x.device).view(-1, 2 * reach + 1, 1, 1, 1)
    x = x.double()
    for axis in (3, 2):
        pad = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
        for _ in range(3):
            padded = F.pad(x, pad, mode="replicate")
            total = torch.full_like(x, 2**23)
            for i in range(2 * reach + 1):
                total.addcmul_(padded.narrow(axis, i, x.shape[axis]), weights[:, i])
            x = total.mul_(2.0**-24).floor_()
    return x.float()


def solarise(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert bright levels like PIL's ``ImageOps.solarize``.

    Args:
        x: (M, 3, H, W) integers from 0 to 255.
        threshold: (M,) levels x at or above it become 255 - x.
    """
    return torch.where(x >= threshold.view(-1, 1, 1, 1), 255 - x, x)


def box_weights(sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights of a box blur's inner pixels and of its two end pixels, and its radius.

    The float32 steps are PIL's, because the last digit of a weight matters.

    Args:
        sigma: (M,) float32 sigma of the Gaussian that three such boxes approximate.

    Returns:
        Inner and outer weights in units of 2**-24, (M,) float64 each, and the ``radius``,
        (M,) int64: the box has ``2 * radius + 1`` inner pixels and a fraction of one at each end.
    """
    one = np.float32(1)
    variance = sigma * sigma / np.float32(3)
    length = np.sqrt(12 * variance.astype(np.float64) + 1).astype(np.float32)
    radius = np.floor((length - one) / 2)
    edge = (2 * radius + one) * (radius * (radius + one) - 3 * variance)
    exact_radius = radius + edge / (6 * (variance - (radius + one) * (radius + one)))
    inner = np.floor(np.float32(2**24) / (exact_radius * 2 + one))
    radius = np.floor(exact_radius).astype(np.int64)
    outer = (2**24 - (2 * radius + 1) * inner.astype(np.int64)) // 2
    return inner.astype(np.float64), outer.astype(np.float64), radius


def normalize(x: Tensor, config: AugmentConfig) -> Tensor:
    """Scale (M, 3, H, W) from 0-255 to 0-1, then normalise each channel by its mean and std."""
    constants = np.array([config.mean, config.std], np.float32).reshape(2, 3, 1, 1)
    mean, std = to_device(constants, x.device).unbind(0)
    return (x / 255 - mean) / std


def _blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Blend like PIL's ``Image.blend``: extrapolate above 1, clip to 0-255, truncate."""
    return (degenerate + factor.view(-1, 1, 1, 1) * (x - degenerate)).clamp(0, 255).floor()


def _luma(x: Tensor) -> Tensor:
    """Return the luma (M, 1, H, W) with PIL's 16-bit weights; exact: sums are below 2**24."""
    r, g, b = x.split(1, dim=1)
    return torch.floor((r * 19595 + g * 38470 + b * 7471 + 32768) / 65536)
