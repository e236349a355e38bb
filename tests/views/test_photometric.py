"""The photometric stage compared with torchvision on PIL images from real JPEGs.

The reference and the compiled CPU code must be equal in every operation and in the full chain: 0
of 255 levels. Normalisation may differ by float32 rounding, a thousandth of a level. Other dtypes
are the float32 values, rounded to nearest.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig
from fastsiam.pipelines.torchvision_backend import apply_view
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import cpu, normalize, photometric, reference
from tests.views.cases import UNEQUAL

FULL_CROP: dict[str, Any] = {"scale_min": 1.0, "scale_max": 1.0, "ratio_min": 1.0, "ratio_max": 1.0}


def jitter(**ranges: float) -> AugmentConfig:
    """Return settings with only the given jitter operations, applied to every view."""
    still: Any = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0) | ranges
    return AugmentConfig.alike(crop=96, jitter_p=1, gray_p=0, blur_p=0, **still, **FULL_CROP)


def blur(low: float, high: float) -> AugmentConfig:
    return jitter().changed(jitter_p=0, blur_p=1, blur_sigma_min=low, blur_sigma_max=high)


CASES = {
    "brightness": jitter(brightness=1.0),
    "contrast": jitter(contrast=1.0),
    "saturation": jitter(saturation=1.0),
    "hue": jitter(hue=0.5),
    "all in any order": jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "gray": jitter().changed(jitter_p=0, gray_p=1),
    "blur": blur(0.1, 2.0),
    "hardly any blur": blur(0.05, 0.2),
    "wide blur": blur(2.0, 9.0),
    "solarise": jitter().changed(jitter_p=0),
    "solarise gray": jitter().changed(jitter_p=0, gray_p=1),
    "solarise blurred": blur(1.3, 1.3),
    "views of different sides": UNEQUAL.changed(**FULL_CROP),
}


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


@pytest.mark.parametrize("case", CASES)
def test_views_match_torchvision(case: str, pictures: list[Image.Image]) -> None:
    """Test each operation with factors and sigmas over its range, then all operations together.

    Each image has its own threshold; 256 leaves white unchanged.
    """
    config, n = CASES[case], len(pictures)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(n), size=[(96, 96)] * n)
    if case.startswith("solarise"):
        threshold = np.random.default_rng(3).integers(0, 257, params.flip.shape, np.int16)
        threshold[:, -3:] = 0, 255, 256
        params = replace(params, solarise=threshold)
    if case.startswith("all"):
        orders = np.array(list(permutations(range(4))), np.int8)
        params = replace(params, order=np.resize(orders, params.order.shape))
    if case.startswith("views"):
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
    before, changed = [side_crops.clone() for side_crops in crops], False
    results = [one.photometric(crops, params, config) for one in (reference, cpu)]
    assert all(map(torch.equal, crops, before))
    for number, both in enumerate(zip(*results, strict=True)):
        assert all(view.is_contiguous(memory_format=torch.channels_last) for view in both)
        for row, picture in enumerate(pictures):
            image = apply_view(picture, params, number, row, config)
            changed |= bool(np.abs(np.asarray(image).astype(int) - crop(number, row)).max() > 20)
            expected = TF.normalize(TF.to_tensor(image), list(config.mean), list(config.std))
            for view in both:
                levels = (view[row] - expected).abs() * torch.tensor(config.std).view(3, 1, 1) * 255
                assert levels.max() < 1e-3, (number, row)
    assert changed or case == "hardly any blur"
    strided = tuple(torch.stack([side_crops, side_crops], dim=2)[:, :, 0] for side_crops in crops)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = photometric(strided, params, config, dtype=dtype)
        for view, exact in zip(rounded, results[1], strict=True):
            assert view.dtype == dtype and torch.equal(view, exact.to(dtype))
            assert view.is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=30)
@given(st.data())
def test_any_settings_match_torchvision(data: st.DataObject) -> None:
    """Any image, side and range of the settings; both implementations."""
    side, seed = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 2**32))
    wide, share = st.floats(0, 3), st.sampled_from([0.0, 0.5, 1.0])
    sigma = data.draw(st.floats(0.01, 6))
    config = AugmentConfig.alike(
        crop=side,
        brightness=data.draw(wide),
        contrast=data.draw(wide),
        saturation=data.draw(wide),
        hue=data.draw(st.floats(0, 0.5)),
        jitter_p=data.draw(share),
        gray_p=data.draw(share),
        blur_p=data.draw(share),
        blur_sigma_min=data.draw(st.floats(0.01, sigma)),
        blur_sigma_max=sigma,
        solarise_p=data.draw(share),
        solarise_threshold=data.draw(st.integers(0, 255)),
        flip_p=0.0,
        **FULL_CROP,
    )
    levels = data.draw(st.sampled_from([(0, 256, 1), (0, 2, 255), (254, 256, 1)]))
    noise = np.random.default_rng(seed).integers(*levels[:2], (2, 4, side, side, 3))
    crops = (noise * levels[2]).astype(np.uint8)
    params = draw_views(config, seed=seed, epoch=0, index=np.arange(4), size=[(side, side)] * 4)
    mean, std = torch.tensor(config.mean).view(3, 1, 1), torch.tensor(config.std).view(3, 1, 1)
    for one in (reference, cpu):
        views = one.photometric((torch.from_numpy(crops.copy()),), params, config)
        for view, row in np.ndindex(2, 4):
            image = apply_view(Image.fromarray(crops[view, row]), params, view, row, config)
            expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
            assert torch.equal((255 * (views[view][row] * std + mean)).round(), expected.float())


def test_ties_round_to_even() -> None:
    """Normalised levels halfway between two numbers of a dtype round to even, up or down."""
    crops = torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8)
    params = draw_views(jitter().changed(jitter_p=0), seed=1, epoch=2, index=[0], size=[(9, 9)])
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        step = 2.0**-digits  # half the spacing of numbers between 1 and 2
        for units in range(1, 8):
            # A black pixel becomes -mean / std, which is exact here.
            config = AugmentConfig(mean=(-1 - units * step,) * 3, std=(1.0, 1.0, 1.0))
            expected = torch.tensor(1 + units * step).to(dtype)
            for black in cpu.photometric((crops,), params, config, dtype=dtype):
                assert (black == expected).all(), (dtype, units)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_normalisation_of_every_level_equals_torchvision(dtype: torch.dtype) -> None:
    """float32 results are bitwise equal; other dtypes are rounded from them."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    config = AugmentConfig()
    theirs = TF.normalize(TF.to_tensor(levels), list(config.mean), list(config.std)).to(dtype)
    ours = normalize(torch.from_numpy(levels)[None], config, dtype=dtype)
    assert ours.dtype == dtype and ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], theirs)
