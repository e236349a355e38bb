"""The kernels on a GPU are bitwise equal to the reference and to PIL, and never synchronise."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.pipelines.job import crop_views
from fastsiam.views.batch import Crops
from fastsiam.views.draws import HUE, draw_views
from fastsiam.views.photometric import photometric, reference
from tests.views.cases import UNEQUAL
from tests.views.kernel_checks import (
    assert_equal_pil,
    assert_equal_reference,
    crops_of,
    crops_of_sides,
)

from .conftest import no_synchronisation

pytestmark = pytest.mark.gpu


def run_on_gpu(function: Any, inputs: Tensor | Crops, *args: Any, **options: Any) -> Any:
    there = inputs.cuda() if isinstance(inputs, Tensor) else tuple(part.cuda() for part in inputs)
    result = function(there, *args, **options)
    return result.cpu() if isinstance(result, Tensor) else tuple(view.cpu() for view in result)


def run_beyond_2_gib(function: Any, pixels: Tensor, start: NDArray[np.int64], *args: Any) -> Tensor:
    """Run on the GPU with pixels at offsets that need more than 32 bits."""
    there = torch.empty(2**31 + len(pixels), dtype=torch.uint8, device="cuda")
    there[2**31 :].copy_(pixels)
    crops: Tensor = function(there, start + 2**31, *args)
    return crops.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_photometric_kernels_equal_reference(
    dtype: torch.dtype, photographs: list[Image.Image]
) -> None:
    """Results are bitwise equal for views of two sides, with solarisation and wide blur."""
    sides = {24: 224, 12: 96}
    views = tuple(
        replace(view, crop=sides[view.crop], blur_sigma_min=0.05, blur_sigma_max=6.0)
        for view in UNEQUAL.views
    )
    config = replace(UNEQUAL, views=views)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(24), size=[(300, 300)] * 24)
    assert (params.solarise < 256).any()
    crops = crops_of_sides(photographs, 24, config)
    assert_equal_reference(run_on_gpu, crops, params, config, dtype)


@pytest.mark.parametrize(("side", "count"), [(224, 512), (32, 4096), (33, 4096)])
def test_photometric_kernels_equal_reference_at_full_batch_size(
    side: int, count: int, photographs: list[Image.Image]
) -> None:
    """Check every 64th image and the last one bitwise; views of odd sides are not whole words."""
    config = AugmentConfig.alike(crop=side, solarise_p=0.2, blur_sigma_max=2.4)
    params = draw_views(
        config, seed=1, epoch=0, index=np.arange(count), size=[(side, side)] * count
    )
    crops = crops_of(photographs, side, 8).repeat(1, count // 8, 1, 1, 1)
    rows = np.append(np.arange(0, count, 64) + np.arange(count // 64) % 8, count - 1)
    views = photometric((crops.cuda(),), params, config, dtype=torch.bfloat16)
    expected = reference.photometric(
        (crops[:, rows],), params.rows(rows), config, dtype=torch.bfloat16
    )
    for ours, theirs in zip(views, expected, strict=True):
        assert torch.equal(ours[torch.from_numpy(rows).cuda()].cpu(), theirs)


@pytest.mark.parametrize("turn", [0.0, 0.37])
def test_hue_of_every_colour_equals_reference(turn: float) -> None:
    """Check all 2**24 colours, as 256 crops of 256 x 256 pixels."""
    colours = torch.arange(2**24, dtype=torch.int32)
    channels = torch.stack([colours >> 16, colours >> 8, colours], 1).to(torch.uint8)
    crops = channels.view(2, 128, 256, 256, 3)
    config = AugmentConfig.alike(crop=256, jitter_p=1, gray_p=0, blur_p=0)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(128), size=[(256, 256)] * 128)
    order, factor = np.full_like(params.order, -1), np.zeros_like(params.factor)
    order[..., 0], factor[..., HUE] = HUE, turn
    params = replace(params, order=order, factor=factor)
    views = photometric((crops.cuda(),), params, config)
    for first in range(0, 128, 16):  # the float64 reference needs memory
        rows = np.arange(first, first + 16)
        expected = reference.photometric((crops[:, rows],), params.rows(rows), config)
        for ours, theirs in zip(views, expected, strict=True):
            assert torch.equal(ours[first : first + 16].cpu(), theirs)


def test_add_rz_truncation_equals_floor() -> None:
    """Check ``add.rz`` close to every integer level, which Triton's interpreter cannot do."""
    import triton
    import triton.language as tl

    from fastsiam.views.photometric import cuda_colours

    @triton.jit  # type: ignore[untyped-decorator]
    def truncate(x, y, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, COUNT)
        tl.store(y + at, cuda_colours._whole(tl.load(x + at)))

    level = torch.arange(1, 257.0)
    below = torch.nextafter(level, torch.zeros(()))
    x = torch.cat([level - 1, below, level - 0.5, torch.zeros(255), torch.tensor([1e-30])]).cuda()
    y = torch.empty_like(x)
    truncate[(1,)](x, y, len(x))
    assert torch.equal(y, x.floor())


@pytest.mark.parametrize(("side", "run"), [(32, run_on_gpu), (224, run_beyond_2_gib)])
def test_crop_kernels_equal_pil(side: int, run: Any, photographs: list[Image.Image]) -> None:
    """Crops of entire photographs are bitwise equal."""
    assert_equal_pil(run, photographs, side)


def test_kernels_never_synchronise_and_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches have any size and parameters. No other test uses a side of 208."""
    import triton

    new: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **kernel: new.append(kernel["repr"])
    )
    config, height, width = AugmentConfig.alike(crop=208), 375, 500
    pixels = torch.randint(0, 256, (20 * height * width * 3,), dtype=torch.uint8, device="cuda")
    for seed in range(8):
        n = 10 + seed
        size, start = np.array([(height, width)] * n), np.arange(n) * height * width * 3
        params = draw_views(config, seed=seed, epoch=0, index=np.arange(n), size=size)
        with no_synchronisation() if seed else contextlib.nullcontext():
            crops = crop_views(pixels, start, size, params, config)
            photometric(crops, params, config, dtype=torch.bfloat16)
        assert len(new) == 5, new  # all in the first batch, none later
