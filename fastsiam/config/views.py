"""Settings of the augmentation: how one image becomes several views."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .checks import require

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_PROBABILITIES = "flip_p", "jitter_p", "gray_p", "blur_p", "solarise_p"


def usual_resize(crop: int) -> int:
    """Return the usual shorter side in pixels before a central crop of so many.

    ImageNet's proportion, 256 before 224; of images of up to 64 pixels, such as CIFAR's, all is
    seen.
    """
    return crop if crop <= 64 else round(crop * 256 / 224)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """One view: how it is made of an image. Defaults are the paper's (section 3)."""

    crop: int = 224
    """Side of a view, in pixels."""
    scale_min: float = 0.2
    """Smallest crop, as a share of the image's area."""
    scale_max: float = 1.0
    """Largest crop, as a share of the image's area."""
    ratio_min: float = 3 / 4
    """Smallest width / height of a crop."""
    ratio_max: float = 4 / 3
    """Largest width / height of a crop."""
    flip_p: float = 0.5
    """Probability of a horizontal flip."""
    jitter_p: float = 0.8
    """Probability of the colour jitter."""
    brightness: float = 0.4
    """Brightness factor is drawn from 1 -+ this."""
    contrast: float = 0.4
    """Contrast factor is drawn from 1 -+ this."""
    saturation: float = 0.4
    """Saturation factor is drawn from 1 -+ this."""
    hue: float = 0.1
    """Hue shift is drawn from -+ this, in turns of the colour circle (0 to 0.5)."""
    gray_p: float = 0.2
    """Probability that a view becomes gray."""
    blur_p: float = 0.5
    """Probability of the Gaussian blur."""
    blur_sigma_min: float = 0.1
    """Smallest sigma of the blur, in pixels of the view."""
    blur_sigma_max: float = 2.0
    """Largest sigma of the blur, in pixels of the view."""
    solarise_p: float = 0.0
    """Probability that bright levels are inverted, after the blur; SimSiam has none."""
    solarise_threshold: int = 128
    """Levels from this on, 0 to 255, are inverted when a view is solarised."""

    def __post_init__(self) -> None:
        require(self.crop >= 1, f"crop must be at least 1 pixel, not {self.crop}")
        require(
            0 < self.scale_min <= self.scale_max <= 1,
            "crop scales must satisfy 0 < scale-min <= scale-max <= 1, "
            f"not {self.scale_min} and {self.scale_max}",
        )
        require(
            0 < self.ratio_min <= self.ratio_max,
            "crop ratios must satisfy 0 < ratio-min <= ratio-max, "
            f"not {self.ratio_min} and {self.ratio_max}",
        )
        for name in _PROBABILITIES:
            value = getattr(self, name)
            require(
                0 <= value <= 1, f"{name.replace('_', '-')} is a probability, 0 to 1, not {value}"
            )
        for name in ("brightness", "contrast", "saturation"):
            require(
                getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}"
            )
        require(0 <= self.hue <= 0.5, f"hue must be 0 to 0.5 turns, not {self.hue}")
        require(
            0 < self.blur_sigma_min <= self.blur_sigma_max,
            "blur sigmas must satisfy 0 < min <= max, "
            f"not {self.blur_sigma_min} and {self.blur_sigma_max}",
        )
        require(
            0 <= self.solarise_threshold <= 255,
            f"solarise-threshold is a level, 0 to 255, not {self.solarise_threshold}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """Views: how one image becomes two of them, or more."""

    views: tuple[ViewConfig, ...] = (ViewConfig(), ViewConfig())
    """How each view is made."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of each channel that normalisation subtracts (images scaled to 0-1)."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Standard deviation of each channel that normalisation divides by."""

    def __post_init__(self) -> None:
        require(len(self.views) >= 2, f"views must be at least 2, not {len(self.views)}")
        require(min(self.std) > 0, f"std must be above 0 in every channel, not {self.std}")

    @classmethod
    def alike(cls, views: int = 2, **settings: Any) -> AugmentConfig:
        """Return so many views that are made alike.

        Args:
            views: how many.
            settings: fields of ``ViewConfig`` for all of them; ``mean`` and ``std``.
        """
        own = {f.name: settings.pop(f.name) for f in fields(ViewConfig) if f.name in settings}
        return cls(views=(ViewConfig(**own),) * views, **settings)

    def changed(self, **settings: Any) -> AugmentConfig:
        """Return the same with some settings of all views changed."""
        return replace(self, views=tuple(replace(view, **settings) for view in self.views))

    @property
    def crop(self) -> int:
        """Side of the largest view in pixels; evaluation's central crops have the same."""
        return max(view.crop for view in self.views)

    @property
    def by_side(self) -> dict[int, tuple[int, ...]]:
        """Numbers of the views of each side, which are made together; sides as they first occur."""
        sides = dict.fromkeys(view.crop for view in self.views)
        return {
            side: tuple(i for i, view in enumerate(self.views) if view.crop == side)
            for side in sides
        }
