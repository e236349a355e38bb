"""Settings of the augmentation: how one image becomes several views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from .setting import Config, convert_value, require, setting, settings_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def usual_resize(crop: int) -> int:
    """Return the usual shorter side, in pixels, of the image before a central crop.

    The ratio is ImageNet's, 256 to 224. Crops of up to 64 pixels (CIFAR) show the entire image.
    """
    return crop if crop <= 64 else round(crop * 256 / 224)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig(Config):
    """Each view: crop, flip, colours and blur. Defaults are the paper's (section 3)."""

    crop: int = setting(224, "Side of a view, in pixels.", at_least=1)
    scale_min: float = setting(
        0.2, "Minimum area of a crop, as a share of the image's area.", above=0, at_most=1
    )
    scale_max: float = setting(
        1.0,
        "Maximum area of a crop, as a share of the image's area.",
        above=0,
        at_most=1,
        option=False,
    )
    ratio_min: float = setting(3 / 4, "Minimum width / height of a crop.", above=0, option=False)
    ratio_max: float = setting(4 / 3, "Maximum width / height of a crop.", above=0, option=False)
    crop_of: int = setting(
        -1,
        "Use the crop and flip of this earlier view (numbered from 0), with other colours; -1: "
        "draw its own.",
        at_least=-1,
        option=False,
    )
    flip_p: float = setting(0.5, "Probability of a horizontal flip.", at_least=0, at_most=1)
    jitter_p: float = setting(
        0.8, "Probability of the colour jitter.", at_least=0, at_most=1, option=False
    )
    brightness: float = setting(
        0.4, "Brightness jitter: the factor is drawn from 1 - X to 1 + X.", at_least=0
    )
    contrast: float = setting(
        0.4, "Contrast jitter: the factor is drawn from 1 - X to 1 + X.", at_least=0
    )
    saturation: float = setting(
        0.4, "Saturation jitter: the factor is drawn from 1 - X to 1 + X.", at_least=0
    )
    hue: float = setting(
        0.1,
        "Hue jitter: the shift is drawn from -X to X turns of the colour circle.",
        at_least=0,
        at_most=0.5,
    )
    gray_p: float = setting(0.2, "Probability of conversion to grayscale.", at_least=0, at_most=1)
    blur_p: float = setting(0.5, "Probability of a Gaussian blur.", at_least=0, at_most=1)
    blur_sigma_min: float = setting(
        0.1, "Minimum sigma of the blur, in pixels of the view.", above=0, option=False
    )
    blur_sigma_max: float = setting(
        2.0, "Maximum sigma of the blur, in pixels of the view.", above=0, option=False
    )
    solarise_p: float = setting(
        0.0,
        "Probability of solarisation (inverting bright pixels) after the blur.",
        at_least=0,
        at_most=1,
        option=False,
    )
    solarise_threshold: int = setting(
        128,
        "Solarisation inverts pixel values from this one upwards (0 to 255).",
        at_least=0,
        at_most=255,
        option=False,
    )

    def check(self) -> None:
        """Raise if the minimum of a range is above its maximum."""
        for name in ("scale", "ratio", "blur_sigma"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            flag = name.replace("_", "-")
            require(low <= high, f"{flag}-min ({low}) must be at most {flag}-max ({high})")


_MOST_VIEWS = 1000
"""Most views per image; more are a typing error, and would take gigabytes of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig(Config):
    """Views: number of views per image, and their normalisation."""

    views: tuple[ViewConfig, ...] = setting(
        (ViewConfig(), ViewConfig()),
        "Number of views per image. View settings take one value for all views, or one per view: "
        "a,b.",
        nested=int,
    )
    mean: tuple[float, float, float] = setting(
        IMAGENET_MEAN,
        "Per-channel mean that normalisation subtracts, for images scaled to 0-1.",
        option=False,
    )
    std: tuple[float, float, float] = setting(
        IMAGENET_STD,
        "Per-channel standard deviation that normalisation divides by.",
        above=0,
        option=False,
    )

    def check(self) -> None:
        """Check that there is a view, and that each ``crop_of`` is an earlier view."""
        object.__setattr__(self, "views", tuple(self.views))
        require(len(self.views) >= 1, f"views must be at least 1, not {len(self.views)}")
        for number, view in enumerate(self.views):
            require(
                view.crop_of < number,
                f"crop-of of view {number} must be the number of an earlier view, or -1 for a crop "
                f"of its own, not {view.crop_of}",
            )

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Build it from values by name. View settings have one value, or one per view."""
        views = settings_of(ViewConfig)
        count = convert_value(int, flags.get("views", 2), "views")
        require(count >= 1, f"views must be at least 1, not {count}")
        require(count <= _MOST_VIEWS, f"views must be at most {_MOST_VIEWS}, not {count}")
        columns = {x: _of_each_view(x, flags[x], count) for x in views if x in flags}
        view_flags = [{name: values[i] for name, values in columns.items()} for i in range(count)]
        other_flags = {name: flags[name] for name in ("mean", "std") if name in flags}
        return cls(views=tuple(ViewConfig(**view) for view in view_flags), **other_flags)

    def to_flags(self) -> dict[str, Any]:
        """Return the values of all settings by name; if views differ, as text ``a,b``."""
        flags = Config.to_flags(self) | {"views": len(self.views)}
        for name in settings_of(ViewConfig):
            values = [getattr(view, name) for view in self.views]
            flags[name] = values[0] if len(set(values)) == 1 else ",".join(map(str, values))
        return flags

    @classmethod
    def alike(cls, views: int = 2, **settings: Any) -> AugmentConfig:
        """Return an augmentation whose views all have the same settings.

        Args:
            views: number of views.
            settings: fields of ``ViewConfig`` for all views; ``mean`` and ``std``.
        """
        view_settings = {
            f.name: settings.pop(f.name) for f in fields(ViewConfig) if f.name in settings
        }
        return cls(views=(ViewConfig(**view_settings),) * views, **settings)

    def changed(self, **settings: Any) -> AugmentConfig:
        """Return a copy with some settings changed in all views."""
        return replace(self, views=tuple(replace(view, **settings) for view in self.views))

    @property
    def crops_of(self) -> list[int]:
        """Number of the view whose crop each view uses; usually its own."""
        numbers: list[int] = []
        for number, view in enumerate(self.views):
            numbers.append(number if view.crop_of < 0 else numbers[view.crop_of])
        return numbers

    @property
    def crop(self) -> int:
        """Side of the largest view in pixels, and of the central crop in evaluations."""
        return max(view.crop for view in self.views)

    @property
    def by_side(self) -> dict[int, tuple[int, ...]]:
        """Numbers of the views of each side, in order of first occurrence of the side."""
        sides = dict.fromkeys(view.crop for view in self.views)
        return {
            side: tuple(i for i, view in enumerate(self.views) if view.crop == side)
            for side in sides
        }


def _of_each_view(name: str, value: Any, count: int) -> list[Any]:
    values = value.strip("[]").split(",") if isinstance(value, str) else value
    values = list(values) if isinstance(values, list | tuple) else [values]
    require(
        len(values) in (1, count),
        f"{name.replace('_', '-')} has {len(values)} values for {count} views; pass one, or one "
        "per view",
    )
    return values * (count // len(values))
