"""The CPU's compiled photometric stage against the reference.

Tolerance: 0 levels; after normalisation, which is one multiplication here and two divisions there,
2e-6 in float32 and one unit of the last place in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import cpu, photometric, reference
from tests.views.cases import UNEQUAL

CONFIG = AugmentConfig()


@pytest.fixture(scope="module")
def photographs(real_images: Path) -> Tensor:
    """(2, 24, 112, 112, 3) uint8, one of them noise and one black."""
    files = sorted(real_images.glob("*/*.JPEG"))[:48]
    photos = [np.asarray(Image.open(file).convert("RGB").resize((112, 112))) for file in files]
    pixels = np.stack(photos).reshape(2, 24, 112, 112, 3)
    pixels[0, 0] = np.random.default_rng(0).integers(0, 256, (112, 112, 3))
    pixels[1, 1] = 0
    return torch.from_numpy(pixels)


def parameters(crops: Tensor, config: AugmentConfig = CONFIG) -> ViewParams:
    n = crops.shape[1]
    return draw_views(config, seed=1, epoch=2, index=np.arange(n), size=[(300, 300)] * n)


def only(params: ViewParams, **changes: Any) -> ViewParams:
    """Return parameters that do nothing, except for the changes."""
    no = np.zeros_like(params.gray)
    nothing = replace(params, jitter=no, gray=no, blur=np.zeros_like(params.blur))
    return replace(nothing, **changes)


def difference(crops: Tensor, params: ViewParams, config: AugmentConfig = CONFIG) -> float:
    """Return the largest, in levels of 255, between the two implementations."""
    ours, theirs = (f((crops,), params, config) for f in (cpu.photometric, reference.photometric))
    scale = 255 * torch.tensor(config.std).view(3, 1, 1)
    return max(float(((a - b).abs() * scale).max()) for a, b in zip(ours, theirs, strict=True))


def test_every_order_of_the_jitter(photographs: Tensor) -> None:
    params = parameters(photographs)
    orders = np.array(list(permutations(range(4))), np.int8)
    assert len(orders) == photographs.shape[1]
    order = np.stack([orders, orders[::-1]])
    changed = only(params, jitter=np.ones_like(params.jitter), order=order)
    assert difference(photographs, changed) < 1e-3


@pytest.mark.parametrize("sigma", [0.0, 1.3])
@pytest.mark.parametrize("gray", [False, True])
def test_solarise(gray: bool, sigma: float, photographs: Tensor) -> None:
    """After the blur, once where gray's three channels are one."""
    params = parameters(photographs)
    threshold = np.random.default_rng(4).integers(0, 257, (2, 24)).astype(np.int16)
    threshold[0, :3] = 0, 255, 256
    blur = np.full((2, 24), sigma, np.float32)
    changed = only(params, gray=np.full((2, 24), gray), blur=blur, solarise=threshold)
    assert difference(photographs, changed) < 1e-3
    same = cpu.photometric((photographs,), replace(changed, solarise=params.solarise), CONFIG)
    inverted = cpu.photometric((photographs,), changed, CONFIG)
    assert torch.equal(inverted[0][2], same[0][2]) and not torch.equal(inverted[0], same[0])


def unequal_crops(photographs: Tensor) -> tuple[Tensor, ...]:
    """Return crops of 24 images as ``UNEQUAL`` has them."""
    both = photographs.flatten(0, 1)
    return tuple(
        torch.stack([both[24 * (v % 2) :][:24, v : v + side, v : v + side] for v in views])
        for side, views in UNEQUAL.by_side.items()
    )


def test_views_of_different_sides(photographs: Tensor) -> None:
    crops = unequal_crops(photographs)
    params = draw_views(UNEQUAL, seed=1, epoch=2, index=np.arange(24), size=[(300, 300)] * 24)
    ours, theirs = (f(crops, params, UNEQUAL) for f in (cpu.photometric, reference.photometric))
    scale = 255 * torch.tensor(UNEQUAL.std).view(3, 1, 1)
    assert [view.shape[2] for view in ours] == [24, 12, 24, 12, 12]
    for one, other in zip(ours, theirs, strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert float(((one - other).abs() * scale).max()) < 1e-3


def test_ties_go_to_the_even_half() -> None:
    """Normalised levels that lie in the middle between two numbers of a type, on either side."""
    crops = torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8)
    crops[0] += 255
    params = parameters(crops)
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        step = 2.0**-digits  # of numbers between 1 and 2, half of the last place
        for units in range(1, 8):
            # A black pixel becomes -mean / std, which is exact for these.
            config = AugmentConfig(mean=(-1 - units * step,) * 3, std=(1.0, 1.0, 1.0))
            _, black = cpu.photometric((crops,), only(params), config, dtype=dtype)
            expected = torch.tensor(1 + units * step).to(dtype)
            assert (black == expected).all(), (dtype, units)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_layout_and_the_source(dtype: torch.dtype, photographs: Tensor) -> None:
    """Rounded to the nearest; of crops with any strides, which stay what they are."""
    params = parameters(photographs)
    before = photographs.clone()
    sliced = torch.stack([photographs, photographs], dim=2)[:, :, 0]
    assert not sliced.is_contiguous()
    for view, expected in zip(
        photometric((sliced,), params, CONFIG, dtype=dtype),
        photometric((photographs,), params, CONFIG),
        strict=True,
    ):
        assert view.dtype == dtype and torch.equal(view, expected.to(dtype))
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(photographs, before)


def test_memory_is_used_again_only_when_nobody_needs_it(photographs: Tensor) -> None:
    params = parameters(photographs)
    view1, view2 = photometric((photographs,), params, CONFIG)
    kept, place = view2.clone(), view1.data_ptr()
    del view1
    again = photometric((photographs.flip(1),), params, CONFIG)
    assert again[0].data_ptr() != place and torch.equal(view2, kept)
    del view2
    assert photometric((photographs,), params, CONFIG)[0].data_ptr() == place
