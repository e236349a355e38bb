"""Views that differ in all that views can differ in."""

from __future__ import annotations

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
"""Two views of 24 pixels and three of 12, in mixed order, one of them without hue."""
