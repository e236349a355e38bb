"""What happens to each image: a pure function of (seed, epoch, image index, view).

A pipeline applies these parameters, it never draws its own. So all pipelines can be held against
one reference, and a run resumed in mid-epoch or on another number of GPUs sees exactly the same
views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastsiam.config import AugmentConfig, ViewConfig

from . import rng

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""The jitter's operations, numbered as in torchvision's ``ColorJitter``."""

NO_LEVEL = 256
"""A threshold of solarising that no level reaches."""

_ORDERS = np.array(list(permutations(range(4))), dtype=np.int8)
_TRIES = 10  # as RandomResizedCrop.get_params
_FIRST_AFTER_CROP = 4 * _TRIES
_DRAWS = _FIRST_AFTER_CROP + 11


@dataclass(frozen=True, slots=True)
class ViewParams:
    """Parameters of the V views of N images. All arrays are numpy, on the host."""

    box: NDArray[np.int32]
    """(V, N, 4): top, left, height, width of the crop, in pixels of the source."""
    flip: NDArray[np.bool_]
    """(V, N): mirror left to right."""
    jitter: NDArray[np.bool_]
    """(V, N): whether the colour jitter applies."""
    order: NDArray[np.int8]
    """(V, N, 4): the jitter's operations in the order in which they apply."""
    factor: NDArray[np.float32]
    """(V, N, 4): factors of brightness, contrast, saturation, and hue (in turns of the circle)."""
    gray: NDArray[np.bool_]
    """(V, N): whether the view becomes gray."""
    blur: NDArray[np.float32]
    """(V, N): sigma of the Gaussian blur in pixels of the view; 0 is no blur."""
    solarise: NDArray[np.int16]
    """(V, N): levels from this on are inverted, after the blur; 256 inverts none."""

    def rows(self, which: slice | NDArray[np.integer]) -> ViewParams:
        """Return the parameters of some of the images."""
        return ViewParams(*(getattr(self, name)[:, which] for name in self.__slots__))

    def views(self, which: Sequence[int]) -> ViewParams:
        """Return the parameters of some of the views, in the order that is asked for."""
        if list(which) == list(range(len(self.flip))):
            return self
        return ViewParams(*(getattr(self, name)[list(which)] for name in self.__slots__))


def draw_views(
    config: AugmentConfig, *, seed: int, epoch: int, index: ArrayLike, size: ArrayLike
) -> ViewParams:
    """Draw the parameters of all views of N images.

    The distributions are those of torchvision's ``RandomResizedCrop.get_params`` (ten tries, then a
    central crop), ``ColorJitter.get_params`` (order included), ``RandomHorizontalFlip``,
    ``RandomGrayscale``, ``RandomSolarize``, and MoCo v2's Gaussian blur (sigma uniform), each
    applied with its probability.

    Args:
        config: ranges and probabilities of each view.
        seed: the run's seed.
        epoch: number of the epoch, from 0.
        index: (N,) position of each image in the data set.
        size: (N, 2) height and width of each source image in pixels.

    Returns:
        Parameters that depend on nothing but the arguments, image by image and view by view:
        neither the other images of the batch, nor their order, nor the number of views matter.
    """
    index, size = np.asarray(index, np.int64), np.asarray(size, np.int64).reshape(-1, 2)
    key = rng.keys(seed, epoch, index[None, :], np.arange(len(config.views))[:, None])
    u = rng.uniform(key, _DRAWS)
    after = u[..., _FIRST_AFTER_CROP:]
    each = partial(_of_each_view, config)
    strength = np.stack([each("brightness"), each("contrast"), each("saturation")], -1)
    low = np.concatenate([np.maximum(0.0, 1 - strength), -each("hue")[..., None]], -1)
    high = np.concatenate([1 + strength, each("hue")[..., None]], -1)
    least, most = each("blur_sigma_min"), each("blur_sigma_max")
    sigma = least + after[..., 9] * (most - least)
    inverts = after[..., 10] < each("solarise_p")
    tries = u[..., :_FIRST_AFTER_CROP].reshape(len(config.views), -1, _TRIES, 4)
    return ViewParams(
        box=np.stack([_crop_boxes(*view, size) for view in zip(config.views, tries, strict=True)]),
        flip=after[..., 0] < each("flip_p"),
        jitter=after[..., 1] < each("jitter_p"),
        order=_ORDERS[(after[..., 2] * len(_ORDERS)).astype(np.int64)],
        factor=(low + after[..., 3:7] * (high - low)).astype(np.float32),
        gray=after[..., 7] < each("gray_p"),
        blur=np.where(after[..., 8] < each("blur_p"), sigma, 0.0).astype(np.float32),
        solarise=np.where(inverts, each("solarise_threshold"), NO_LEVEL).astype(np.int16),
    )


def _of_each_view(config: AugmentConfig, name: str) -> NDArray[np.float64]:
    """Return one setting of all views: (V, 1)."""
    return np.array([[getattr(view, name)] for view in config.views], np.float64)


def _crop_boxes(
    view: ViewConfig, u: NDArray[np.float64], size: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Boxes (N, 4) from uniforms (N, tries, 4): the first try to fit, else a central crop."""
    height, width = size[:, None, 0], size[:, None, 1]
    area = height * width * (view.scale_min + u[..., 0] * (view.scale_max - view.scale_min))
    log_ratio = np.log(view.ratio_min) + u[..., 1] * np.log(view.ratio_max / view.ratio_min)
    ratio = np.exp(log_ratio)
    w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    top = (u[..., 2] * (height - h + 1)).astype(np.int64)
    left = (u[..., 3] * (width - w + 1)).astype(np.int64)
    tries = np.stack([top, left, h, w], axis=-1)
    first = np.argmax(fits, axis=-1)[:, None, None]
    chosen = np.take_along_axis(tries, first, axis=1)[:, 0]
    return np.where(fits.any(-1)[:, None], chosen, _central_box(view, size)).astype(np.int32)


def _central_box(config: ViewConfig, size: NDArray[np.int64]) -> NDArray[np.int64]:
    """``RandomResizedCrop``'s fallback: the largest central box (N, 4) with an allowed ratio."""
    height, width = size[:, 0], size[:, 1]
    ratio = width / height
    w = np.where(ratio > config.ratio_max, np.rint(height * config.ratio_max), width).astype(
        np.int64
    )
    h = np.where(ratio < config.ratio_min, np.rint(width / config.ratio_min), height).astype(
        np.int64
    )
    w, h = np.clip(w, 1, width), np.clip(h, 1, height)
    return np.stack([(height - h) // 2, (width - w) // 2, h, w], axis=-1)
