"""Random augmentation parameters: a pure function of (seed, epoch, image index, view).

All pipelines apply these parameters instead of drawing their own. So every pipeline can be tested
against one reference, and a run that resumes mid-epoch, or on another number of GPUs, sees exactly
the same views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastsiam.config import AugmentConfig

from . import rng

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""Operations of the colour jitter, numbered as in torchvision's ``ColorJitter``."""

NO_LEVEL = 256
"""Solarisation threshold above all levels: no solarisation."""

_ORDERS = np.array(list(permutations(range(4))), dtype=np.int8)
_TRIES = 10  # as in RandomResizedCrop.get_params
_FIRST_AFTER_CROP = 4 * _TRIES
_AFTER_CROP = 11


@dataclass(frozen=True, slots=True)
class ViewParams:
    """Augmentation parameters of the V views of N images. All arrays are numpy, on the host."""

    box: NDArray[np.int32]
    """(V, N, 4): top, left, height and width of the crop, in pixels of the source."""
    flip: NDArray[np.bool_]
    """(V, N): whether the view is flipped horizontally."""
    jitter: NDArray[np.bool_]
    """(V, N): whether the colour jitter applies."""
    order: NDArray[np.int8]
    """(V, N, 4): the jitter's operations in the order in which they apply."""
    factor: NDArray[np.float32]
    """(V, N, 4): factors of brightness, contrast and saturation, and the hue shift (in turns)."""
    gray: NDArray[np.bool_]
    """(V, N): whether the view is converted to gray."""
    blur: NDArray[np.float32]
    """(V, N): sigma of the Gaussian blur, in pixels of the view; 0 means no blur."""
    solarise: NDArray[np.int16]
    """(V, N): levels from this threshold on are inverted, after the blur; 256 inverts none."""

    def rows(self, which: slice | NDArray[np.integer]) -> ViewParams:
        """Return the parameters of the given images."""
        return ViewParams(*(getattr(self, name)[:, which] for name in self.__slots__))

    @classmethod
    def concatenate(cls, parts: Sequence[ViewParams]) -> ViewParams:
        """Concatenate the parameters of several sets of images, in order."""
        columns = ([getattr(part, name) for part in parts] for name in cls.__slots__)
        return cls(*(np.concatenate(column, axis=1) for column in columns))

    def views(self, which: Sequence[int]) -> ViewParams:
        """Return the parameters of the given views, in the given order."""
        if list(which) == list(range(len(self.flip))):
            return self
        return ViewParams(*(getattr(self, name)[list(which)] for name in self.__slots__))


def draw_views(
    config: AugmentConfig, *, seed: int, epoch: int, index: ArrayLike, size: ArrayLike
) -> ViewParams:
    """Draw the augmentation parameters of all views of N images.

    The distributions are those of torchvision's ``RandomResizedCrop.get_params`` (ten tries, then a
    central crop), ``ColorJitter.get_params`` (including the order), ``RandomHorizontalFlip``,
    ``RandomGrayscale``, ``RandomSolarize``, and MoCo v2's Gaussian blur (uniform sigma). Each
    applies with its own probability.

    Args:
        config: ranges and probabilities of each view.
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        index: (N,) position of each image in the data set.
        size: (N, 2) height and width of each source image in pixels.

    Returns:
        The parameters. Those of a view depend only on the configuration, the seed, the epoch, the
        image's index and size, and the view, not on the other images of the batch.
    """
    index, size = np.asarray(index, np.int64), np.asarray(size, np.int64).reshape(-1, 2)
    ranges, views = _ranges(config), len(config.views)
    key = rng.keys(seed, epoch, index[None, :], np.arange(views)[:, None])
    draws = rng.uniform(key, _AFTER_CROP, skip=_FIRST_AFTER_CROP)
    factor = ranges["factor"] + draws[..., 3:7] * ranges["factor_width"]
    sigma = ranges["blur_sigma_min"] + draws[..., 9] * ranges["sigma_width"]
    threshold = np.where(
        draws[..., 10] < ranges["solarise_p"], ranges["solarise_threshold"], NO_LEVEL
    )
    box, flip = _crop_boxes(ranges, key, size), draws[..., 0] < ranges["flip_p"]
    if any(view.crop_of >= 0 for view in config.views):
        box, flip = box[config.crops_of], flip[config.crops_of]
    return ViewParams(
        box=box,
        flip=flip,
        jitter=draws[..., 1] < ranges["jitter_p"],
        order=_ORDERS[(draws[..., 2] * len(_ORDERS)).astype(np.int64)],
        factor=factor.astype(np.float32),
        gray=draws[..., 7] < ranges["gray_p"],
        blur=np.where(draws[..., 8] < ranges["blur_p"], sigma, 0.0).astype(np.float32),
        solarise=threshold.astype(np.int16),
    )


@lru_cache(maxsize=8)
def _ranges(config: AugmentConfig) -> NDArray[np.void]:
    """Return the settings of V views and values derived from them: (V, 1) structured float64.

    ``factor`` has the smallest factors of brightness, contrast and saturation, and the smallest hue
    shift; ``log_ratio`` is the logarithm of ``ratio_min``. Fields that end in ``width`` are the
    widths of the ranges that start at these values.
    """
    rows = []
    for view in config.views:
        strengths = view.brightness, view.contrast, view.saturation
        least = np.array([*(max(0.0, 1 - strength) for strength in strengths), -view.hue])
        most = np.array([*(1 + strength for strength in strengths), view.hue])
        derived_values = {
            "scale_width": view.scale_max - view.scale_min,
            "log_ratio": np.log(view.ratio_min),
            "log_ratio_width": np.log(view.ratio_max / view.ratio_min),
            "factor": least,
            "factor_width": most - least,
            "sigma_width": view.blur_sigma_max - view.blur_sigma_min,
        }
        rows.append(asdict(view) | derived_values)
    columns = [(name, np.float64, np.shape(value)) for name, value in rows[0].items()]
    return np.array([tuple(row.values()) for row in rows], columns)[:, None]


def _crop_boxes(
    ranges: NDArray[np.void], key: NDArray[np.uint64], size: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return crop boxes (V, N, 4) for keys (V, N): the first try that fits, else a central crop.

    The first try fits for most views, so further tries are drawn only for the others.
    """
    tries, fit = _tries(ranges, rng.uniform(key, 4), size)
    box = tries[:, :, 0]
    view, image = np.nonzero(~fit[:, :, 0])
    if len(view):
        view_ranges, sizes = ranges[view], size[image, None]
        u = rng.uniform(key[view, image, None], 4 * _TRIES - 4, skip=4)
        tries, fit = _tries(view_ranges, u, sizes)
        first_fit = tries[np.arange(len(view)), 0, np.argmax(fit[:, 0], axis=-1)]
        fits = fit.any(axis=-1)
        box[view, image] = np.where(fits, first_fit, _central_boxes(view_ranges, sizes)[:, 0])
    return box.astype(np.int32)


def _tries(
    ranges: NDArray[np.void], u: NDArray[np.float64], size: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return candidate boxes (V, N, tries, 4), and whether each fits in the image (V, N, tries).

    Args:
        ranges: ranges of V views.
        u: (V, N, tries * 4) uniform random numbers in [0, 1).
        size: (N, 2) or (V, N, 2) height and width of the images.
    """
    u = u.reshape(*u.shape[:-1], u.shape[-1] // 4, 4)
    height, width = size[..., :1], size[..., 1:]
    scale = ranges["scale_min"][..., None] + u[..., 0] * ranges["scale_width"][..., None]
    area = height * width * scale
    log_ratio = ranges["log_ratio"][..., None] + u[..., 1] * ranges["log_ratio_width"][..., None]
    ratio = np.exp(log_ratio)
    w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    top = (u[..., 2] * (height - h + 1)).astype(np.int64)
    left = (u[..., 3] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], axis=-1), fits


def _central_boxes(ranges: NDArray[np.void], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest central boxes of allowed aspect ratio: RandomResizedCrop's fallback."""
    height, width = size[..., 0], size[..., 1]
    ratio, least, most = width / height, ranges["ratio_min"], ranges["ratio_max"]
    w = np.where(ratio > most, np.rint(height * most), width).astype(np.int64)
    h = np.where(ratio < least, np.rint(width / least), height).astype(np.int64)
    w, h = np.clip(w, 1, width), np.clip(h, 1, height)
    return np.stack([(height - h) // 2, (width - w) // 2, h, w], axis=-1)
