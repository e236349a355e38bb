"""Colour operations and blur of every kernel library equal PIL's, for every level and colour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION, draw_views
from fastsiam.views.photometric import cpu
from tests.tiers import rest_slow

CONFIG = AugmentConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
ENHANCERS = {
    BRIGHTNESS: ImageEnhance.Brightness,
    CONTRAST: ImageEnhance.Contrast,
    SATURATION: ImageEnhance.Color,
}
Pixels = NDArray[np.uint8]


@pytest.fixture(autouse=True, params=library.kinds())
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.CHOICE, request.param)


def levels_after(pictures: Pixels, **changes: Any) -> Pixels:
    """Return the levels of pictures (2, N, height, width, 3) after operations in ``changes``."""
    n = pictures.shape[1]
    params = draw_views(CONFIG, seed=0, epoch=0, index=np.arange(n), size=[(9, 9)] * n)
    no, none = np.zeros_like(params.gray), np.zeros_like(params.blur)
    params = replace(replace(params, jitter=no, gray=no, blur=none), **changes)
    views = cpu.photometric((torch.from_numpy(pictures),), params, CONFIG)
    levels: Pixels = np.rint(255 * torch.stack(views).permute(0, 1, 3, 4, 2).numpy()).astype(
        np.uint8
    )
    return levels


def jitter(pictures: Pixels, operation: int, factor: NDArray[np.float32]) -> Pixels:
    """Apply one jitter operation to pictures, with a (2, N) factor for each picture."""
    order = np.full((*factor.shape, 4), -1, np.int8)
    order[..., 0] = operation
    factors = np.repeat(factor[..., None], 4, axis=2)
    return levels_after(pictures, jitter=np.ones(factor.shape, bool), order=order, factor=factors)


@pytest.mark.parametrize("operation", ENHANCERS)
def test_blends_equal_pil(operation: int) -> None:
    """Include factors above 2 and those that 16-bit arithmetic cannot represent."""
    generator = np.random.default_rng(operation)
    factor = generator.uniform(0.6, 1.4, (2, 400)).astype(np.float32)
    factor[1, :60] = np.linspace(0, 3, 60)
    pictures = generator.integers(0, 256, (2, 400, 16, 48, 3), np.uint8)
    pictures[:, :, :, :16] = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)  # every level
    ours = jitter(pictures, operation, factor)
    for v, i in np.ndindex(factor.shape):
        theirs = ENHANCERS[operation](Image.fromarray(pictures[v, i])).enhance(float(factor[v, i]))
        assert np.array_equal(ours[v, i], np.asarray(theirs)), factor[v, i]


ALL = [(1, 0.07, -0.5), (1, 0.0, 0.5), (1, -0.1, 0.37)]


@pytest.mark.parametrize(("step", "first", "second"), rest_slow([(3, 0.07, -0.5), *ALL]))
def test_hue_of_every_colour_equals_pil(step: int, first: float, second: float) -> None:
    """The fast tests use every third level."""
    levels = np.arange(0, 256, step, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1)
    cube = cube.reshape(1, len(levels), len(levels), len(levels), 3)
    factor = np.repeat(np.array([[first], [second]], np.float32), len(levels), axis=1)
    ours = jitter(np.repeat(cube, 2, axis=0), HUE, factor)
    hsv = np.array(Image.fromarray(cube.reshape(len(levels), -1, 3)).convert("HSV"))
    for v in range(2):
        turned = hsv.copy()
        turned[..., 0] += (
            np.array(factor[v, 0].astype(float) * 255).astype(np.int32).astype(np.uint8)
        )
        theirs = np.asarray(Image.fromarray(turned, "HSV").convert("RGB"))
        assert np.array_equal(ours[v].reshape(theirs.shape), theirs)


@pytest.mark.parametrize(("low", "high"), [(0.02, 1.42), (1.42, 2.5), (2.5, 200.0)])
def test_blur_equals_pil(low: float, high: float) -> None:
    """Include sigmas whose box weights or sums do not fit into 16 bits."""
    generator = np.random.default_rng(1)
    sigma = np.exp(generator.uniform(np.log(low), np.log(high), (2, 300))).astype(np.float32)
    pictures = generator.integers(0, 256, (2, 300, 21, 37, 3), np.uint8)
    pictures[:, ::3] = np.where(pictures[:, ::3] > 127, 255, 0)  # the highest possible steps
    ours = levels_after(pictures, blur=sigma)
    for v, i in np.ndindex(sigma.shape):
        theirs = Image.fromarray(pictures[v, i]).filter(
            ImageFilter.GaussianBlur(float(sigma[v, i]))
        )
        assert np.array_equal(ours[v, i], np.asarray(theirs)), sigma[v, i]
