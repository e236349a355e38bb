"""The reference of the photometric augmentations: torch operations on batches, on any device.

These are torchvision's operations on PIL images, with separate parameters for each image. PIL works
in uint8 and truncates after every operation, and so does the reference: on the CPU each operation
is bit-identical to PIL, as tests/views checks. The fast implementations are tested against it.
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

from .operations import Operations, side_by_side


@torch.no_grad()
def _finish(crops: Tensor, what: Operations, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Apply the augmentations to crops of one side; see ``operations.Finish``."""
    images = crops.permute(0, 3, 1, 2)
    x = images.to(torch.float32, memory_format=torch.contiguous_format)

    def change(rows: NDArray[np.int64], operation: Callable[..., Tensor], *given: Any) -> None:
        if len(rows):
            at = to_device(rows, x.device)
            own = (value[at] if isinstance(value, Tensor) else value[rows] for value in given)
            x.index_copy_(0, at, operation(x[at], *own))

    factor = to_device(what.factor, x.device)
    for slot in range(4):
        for op, operation in _JITTER.items():
            change(np.flatnonzero(what.order[:, slot] == op), operation, factor[:, op])
    change(np.flatnonzero(what.gray), grayscale)
    change(what.blurred, gaussian_blur, what.blur)
    change(what.solarised, solarise, to_device(what.solarise, x.device))
    return normalize(x, config).to(dtype, memory_format=torch.channels_last)


photometric = partial(side_by_side, _finish)
"""Function that applies the augmentations; see ``fastsiam.views.photometric.photometric``."""


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with black.

    Shapes as for all jitter operations: x (M, 3, H, W) whole 0-255, factor (M,).
    """
    return _blend(torch.zeros((), device=x.device), x, factor)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean gray, rounded to a whole level as PIL does."""
    mean = _luma(x).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64)
    return _blend((mean + 0.5).floor().float(), x, factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's own gray version."""
    return _blend(_luma(x), x, factor)


def adjust_hue(x: Tensor, factor: Tensor) -> Tensor:
    """Shift the hue by ``factor`` turns, in PIL's HSV with its 256 hues and saturations."""
    r, g, b = x.unbind(1)
    value, low = x.amax(1), x.amin(1)
    chroma = value - low
    safe = chroma.clamp(min=1)
    rc, gc, bc = (value - r) / safe, (value - g) / safe, (value - b) / safe
    rc, gc, bc = rc.double(), gc.double(), bc.double()  # like PIL, which mixes float and double
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
    """Replace RGB by its ITU-R 601-2 luma, on all three channels; x (M, 3, H, W) whole 0-255."""
    return _luma(x).expand_as(x)


def gaussian_blur(x: Tensor, sigma: np.ndarray) -> Tensor:
    """Blur as PIL's ``ImageFilter.GaussianBlur(sigma)``: three box blurs along each axis.

    Args:
        x: (M, 3, H, W) whole 0-255.
        sigma: (M,) on the host, in pixels, above 0.

    Each pass is a box of fractional length whose edge pixel is repeated outwards, rounded to whole
    levels; lengths by Gwosdek et al., "Theoretical foundations of Gaussian convolution by extended
    box filtering" (SSVM 2011), equations 7, 11 and 14. PIL's weights are whole 2**-24ths, so its
    sums are whole numbers below 2**33, which float64 holds exactly.
    """
    inner, outer, whole = box_weights(np.asarray(sigma, np.float32))
    reach = int(whole.max()) + 1
    offset = np.abs(np.arange(-reach, reach + 1))
    taps = np.where(offset <= whole[:, None], inner[:, None], 0.0)
    taps += np.where(offset == whole[:, None] + 1, outer[:, None], 0.0)
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
    """Invert bright levels, as PIL's ``ImageOps.solarize``.

    Args:
        x: (M, 3, H, W) whole 0-255.
        threshold: (M,) levels from this on become 255 minus themselves.
    """
    return torch.where(x >= threshold.view(-1, 1, 1, 1), 255 - x, x)


def box_weights(sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights of a box blur's inner pixels and of its two end pixels, and its radius.

    Computed in float32 in the same steps as PIL, because the last digit of a weight matters.

    Args:
        sigma: (M,) float32, of the Gaussian that three such boxes approximate.

    Returns:
        Inner and outer weights in units of 2**-24, (M,) float64 each, and the radius ``whole``,
        (M,) int64: the box has ``2 * whole + 1`` inner pixels and a part of one pixel at each end.
    """
    one = np.float32(1)
    variance = sigma * sigma / np.float32(3)
    length = np.sqrt(12 * variance.astype(np.float64) + 1).astype(np.float32)
    whole = np.floor((length - one) / 2)
    edge = (2 * whole + one) * (whole * (whole + one) - 3 * variance)
    radius = whole + edge / (6 * (variance - (whole + one) * (whole + one)))
    inner = np.floor(np.float32(2**24) / (radius * 2 + one))
    whole = np.floor(radius).astype(np.int64)
    outer = (2**24 - (2 * whole + 1) * inner.astype(np.int64)) // 2
    return inner.astype(np.float64), outer.astype(np.float64), whole


def normalize(x: Tensor, config: AugmentConfig) -> Tensor:
    """Scale (M, 3, H, W) from 0-255 to 0-1, then normalise each channel by its mean and std."""
    constants = np.array([config.mean, config.std], np.float32).reshape(2, 3, 1, 1)
    mean, std = to_device(constants, x.device).unbind(0)
    return (x / 255 - mean) / std


def _blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Blend like PIL's ``Image.blend``: extrapolate above 1, clip to 0-255, truncate."""
    return (degenerate + factor.view(-1, 1, 1, 1) * (x - degenerate)).clamp(0, 255).floor()


def _luma(x: Tensor) -> Tensor:
    """Return the luma, (M, 1, H, W), with PIL's 16-bit weights; float32 is exact below 2**24."""
    r, g, b = x.split(1, dim=1)
    return torch.floor((r * 19595 + g * 38470 + b * 7471 + 32768) / 65536)
