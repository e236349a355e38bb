"""View settings that cover every option, and reference crops by PIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.config import AugmentConfig, ViewConfig

UNEQUAL = AugmentConfig(
    views=(
        ViewConfig(crop=24, blur_p=1.0, jitter_p=1.0),
        ViewConfig(crop=12, scale_min=0.05, scale_max=0.3, hue=0.0, jitter_p=1.0),
        ViewConfig(crop=24, blur_p=0.3, gray_p=0.5, solarise_p=0.6, solarise_threshold=90),
        ViewConfig(crop=12, blur_sigma_max=4.0, solarise_p=0.6, brightness=0.9),
        ViewConfig(crop=12, jitter_p=0.0, flip_p=1.0, gray_p=0.0),
    )
)
"""Two views of 24 pixels and three of 12 in mixed order, one of them without hue changes."""


def pil_crop(image: Image.Image, box: Any, flip: bool, side: int) -> NDArray[np.uint8]:
    """Return a crop as torchvision computes it: resized to a square and optionally flipped."""
    top, left, height, width = box.tolist()
    crop = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(crop.resize((side, side), Image.Resampling.BILINEAR))
    return pixels[:, ::-1] if flip else pixels
