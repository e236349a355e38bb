"""What is the CPU's own in the photometric stage: rounding to other types."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import cpu, photometric

CONFIG = AugmentConfig()


@pytest.fixture
def crops() -> Tensor:
    """(2, 24, 112, 112, 3) uint8 of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 112, 112, 3), np.uint8)
    return torch.from_numpy(pixels)


def parameters(crops: Tensor) -> ViewParams:
    n = crops.shape[1]
    return draw_views(CONFIG, seed=1, epoch=2, index=np.arange(n), size=[(300, 300)] * n)


def test_ties_go_to_the_even_half() -> None:
    """Normalised levels that lie in the middle between two numbers of a type, on either side."""
    crops = torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8)
    crops[0] += 255
    params = parameters(crops)
    no = np.zeros_like(params.gray)
    params = replace(params, jitter=no, gray=no, blur=np.zeros_like(params.blur))
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        step = 2.0**-digits  # of numbers between 1 and 2, half of the last place
        for units in range(1, 8):
            # A black pixel becomes -mean / std, which is exact for these.
            config = AugmentConfig(mean=(-1 - units * step,) * 3, std=(1.0, 1.0, 1.0))
            _, black = cpu.photometric((crops,), params, config, dtype=dtype)
            expected = torch.tensor(1 + units * step).to(dtype)
            assert (black == expected).all(), (dtype, units)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_and_layouts(dtype: torch.dtype, crops: Tensor) -> None:
    """Rounded to the nearest; of crops with any strides."""
    params = parameters(crops)
    sliced = torch.stack([crops, crops], dim=2)[:, :, 0]
    assert not sliced.is_contiguous()
    views = photometric((sliced,), params, CONFIG, dtype=dtype)
    for view, expected in zip(views, photometric((crops,), params, CONFIG), strict=True):
        assert view.dtype == dtype and torch.equal(view, expected.to(dtype))
        assert view.is_contiguous(memory_format=torch.channels_last)
