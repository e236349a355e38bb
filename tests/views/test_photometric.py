"""The photometric reference against torchvision on PIL images, on real JPEGs.

Tolerance: 0 levels of 255 for every operation and for the whole chain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.pipelines.torchvision_backend import apply_view
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import normalized
from fastsiam.views.photometric import reference as P
from tests.views.cases import UNEQUAL


@pytest.fixture(scope="module")
def pictures(real_images: Path) -> list[Image.Image]:
    files = sorted(real_images.glob("*/*.JPEG"))[:48]
    natural = [
        Image.open(file).convert("RGB").resize((96, 96), Image.Resampling.BILINEAR)
        for file in files
    ]
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    flat = np.zeros((96, 96, 3), np.uint8)
    return [*natural, Image.fromarray(noise), Image.fromarray(flat), Image.fromarray(255 - flat)]


def to_tensor(pictures: list[Image.Image]) -> Tensor:
    pixels = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().contiguous()


def difference(ours: Tensor, theirs: list[Image.Image]) -> int:
    return int((ours - to_tensor(theirs)).abs().max())


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (P.adjust_brightness, TF.adjust_brightness, 0.0, 2.0),
        (P.adjust_contrast, TF.adjust_contrast, 0.0, 2.0),
        (P.adjust_saturation, TF.adjust_saturation, 0.0, 2.0),
        (P.adjust_hue, TF.adjust_hue, -0.5, 0.5),
    ],
)
def test_jitter_operation_equals_torchvisions(
    ours: Callable[[Tensor, Tensor], Tensor],
    theirs: Callable[[Image.Image, float], Image.Image],
    low: float,
    high: float,
    pictures: list[Image.Image],
) -> None:
    factors = np.random.default_rng(1).uniform(low, high, len(pictures)).astype(np.float32)
    expected = [theirs(picture, float(f)) for picture, f in zip(pictures, factors, strict=True)]
    assert difference(ours(to_tensor(pictures), torch.from_numpy(factors)), expected) == 0
    assert difference(to_tensor(pictures), expected) > 20  # the operation does something


def test_gray_equals_torchvisions(pictures: list[Image.Image]) -> None:
    expected = [TF.rgb_to_grayscale(picture, 3) for picture in pictures]
    assert difference(P.grayscale(to_tensor(pictures)), expected) == 0


@pytest.mark.parametrize(("low", "high"), [(0.1, 2.0), (0.05, 0.2), (2.0, 9.0)])
def test_blur_equals_pils(low: float, high: float, pictures: list[Image.Image]) -> None:
    sigma = np.random.default_rng(2).uniform(low, high, len(pictures)).astype(np.float32)
    expected = [
        p.filter(ImageFilter.GaussianBlur(float(s))) for p, s in zip(pictures, sigma, strict=True)
    ]
    assert difference(P.gaussian_blur(to_tensor(pictures), sigma), expected) == 0


def test_each_view_has_its_own_threshold(pictures: list[Image.Image]) -> None:
    """And 256 leaves white as it is."""
    thresholds = np.random.default_rng(3).integers(0, 257, len(pictures))
    thresholds[-1] = 256
    expected = [
        TF.solarize(picture, int(t)) if t < 256 else picture
        for picture, t in zip(pictures, thresholds, strict=True)
    ]
    assert difference(P.solarise(to_tensor(pictures), torch.from_numpy(thresholds)), expected) == 0


def test_views_of_different_sides_equal_the_baselines(pictures: list[Image.Image]) -> None:
    """Each with its own probabilities, one without hue, in the order of the settings."""
    config = UNEQUAL.changed(scale_min=1.0, scale_max=1.0, ratio_min=1.0, ratio_max=1.0)
    n = len(pictures)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(n), size=[(96, 96)] * n)
    blurred, solarised = params.blur > 0, params.solarise < 256
    assert (blurred & solarised & params.gray).any() and (solarised & ~blurred).any()

    def crop(number: int, row: int) -> np.ndarray:
        side = config.views[number].crop
        small = np.asarray(pictures[row].resize((side, side), Image.Resampling.BILINEAR))
        return small[:, ::-1] if params.flip[number, row] else small

    crops = tuple(
        torch.from_numpy(np.stack([[crop(v, row) for row in range(n)] for v in numbers]))
        for numbers in config.by_side.values()
    )
    views = P.photometric(crops, params, config)
    assert [view.shape[2] for view in views] == [24, 12, 24, 12, 12]
    for number, view in enumerate(views):
        assert view.is_contiguous(memory_format=torch.channels_last)
        for row, picture in enumerate(pictures):
            expected = TF.to_tensor(apply_view(picture, params, number, row, config))
            expected = TF.normalize(expected, list(config.mean), list(config.std))
            levels = (view[row] - expected).abs() * torch.tensor(config.std).view(3, 1, 1) * 255
            assert levels.max() < 1e-3, (number, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_level_is_normalised_as_torchvision_does(dtype: torch.dtype) -> None:
    """To the last bit of float32, and then rounded."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    config = AugmentConfig()
    theirs = TF.normalize(TF.to_tensor(levels), list(config.mean), list(config.std)).to(dtype)
    ours = normalized(torch.from_numpy(levels)[None], config, dtype=dtype)
    assert ours.dtype == dtype and ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], theirs)
