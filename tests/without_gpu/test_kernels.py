"""What the kernels' launches hand over, at the sizes of real batches, which no test could hold.

tests/views/test_cuda_kernels.py has the numbers, of small images.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric
from tests.views.cases import UNEQUAL

from .conftest import Launch
from .fake_gpu import CUDA, Gpu
from .integers import overflows

pytest.importorskip("triton")  # comes with torch where there can be a CUDA GPU

import triton
import triton.language as tl

PAPER = AugmentConfig.alike(crop=224)
EIGHT = AugmentConfig(views=4 * PAPER.views)
"""Eight views of 224 pixels: with 4096 images their bytes are too many for 32 bits."""


def launch_all(gpu: Gpu, config: AugmentConfig, images: int, dtype: torch.dtype) -> None:
    """Take images of 500 x 375 through both stages, checking what comes out."""
    height, width = 375, 500
    size, start = np.full((images, 2), (height, width)), np.arange(images) * height * width * 3
    params = draw_views(config, seed=0, epoch=0, index=np.arange(images), size=size)
    pixels = torch.empty(images * height * width * 3, dtype=torch.uint8, device=CUDA)
    with gpu.watched():
        crops = crop_views(pixels, start, size, params, config)
        views = photometric(crops, params, config, dtype=dtype)
    assert not gpu.on_the_host()
    for own, (side, numbers) in zip(crops, config.by_side.items(), strict=True):
        assert own.shape == (len(numbers), images, side, side, 3) and own.dtype == torch.uint8
        assert own.is_cuda and own.is_contiguous()
    for view, settings in zip(views, config.views, strict=True):
        assert view.shape == (images, 3, settings.crop, settings.crop) and view.dtype == dtype
        assert view.is_cuda and view.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("images", [1, 37, 512, 4096])
@pytest.mark.parametrize("config", [PAPER, UNEQUAL], ids=["paper", "unequal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_launches(
    dtype: torch.dtype, config: AugmentConfig, images: int, launches: list[Launch], gpu: Gpu
) -> None:
    """Dense tensors of the GPU from 16-byte addresses: others would compile other kernels."""
    launch_all(gpu, config, images, dtype)
    assert len(gpu.copied) == 2 * len(config.by_side)  # one upload a side and stage
    assert launches
    for launch in launches:
        assert 0 < launch.grid[0] < 2**31 and all(0 < n < 2**16 for n in launch.grid[1:])
        for tensor in launch.tensors:
            assert tensor.is_cuda and tensor.is_contiguous()
            assert tensor.storage_offset() * tensor.itemsize % 16 == 0


def test_crops_that_lie_apart_are_taken_too(launches: list[Launch], gpu: Gpu) -> None:
    """DALI's, for instance: any strides."""
    size = np.full((8, 2), (32, 32))
    config = AugmentConfig.alike(crop=32)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(8), size=size)
    crops = torch.empty(8, 2, 32, 32, 3, dtype=torch.uint8, device=CUDA).transpose(0, 1)
    for view in photometric((crops,), params, config):
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_contiguous() for launch in launches for tensor in launch.tensors)


@pytest.mark.parametrize("config", [PAPER, EIGHT], ids=["2 views", "8 views"])
def test_no_index_leaves_32_bits(config: AugmentConfig, launches: list[Launch], gpu: Gpu) -> None:
    """4096 images of 224 pixels, and four times as many views as have room in 32 bits."""
    launch_all(gpu, config, 4096, torch.bfloat16)
    largest = max(t.numel() for launch in launches for t in launch.tensors)
    assert largest > (2**32 if config is EIGHT else 2**30)
    seen = set()
    for launch in launches:
        if (own := (launch.kernel, *launch.args[-5:])) not in seen:
            seen.add(own)
            assert not overflows(launch.ttir(), launch.grid), launch.kernel


def test_an_index_that_leaves_32_bits_is_found(gpu: Gpu) -> None:
    """A test of the test: the same arithmetic with and without a cast."""
    careless, careful = (
        kernel.warmup(torch.uint8, 3 * 224 * 224, grid=(1,)).asm["ttir"]
        for kernel in (_careless, _careful)
    )
    assert not overflows(careless, (14_000 * 49,)) and not overflows(careful, (15_000 * 49,))
    (line,) = overflows(careless, (15_000 * 49,))
    assert "muli" in line


@triton.jit
def _careless(out, SIZE: tl.constexpr):
    view = tl.program_id(0) // 49
    tl.store(out + view * SIZE, 0)


@triton.jit
def _careful(out, SIZE: tl.constexpr):
    view = (tl.program_id(0) // 49).to(tl.int64)
    tl.store(out + view * SIZE, 0)
