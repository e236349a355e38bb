"""Arguments of kernel launches for batches of real size, which would be too large to run here.

tests/views/test_cuda_kernels.py checks the values, on small images.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric
from tests.conftest import import_or_skip
from tests.views.cases import UNEQUAL

from .conftest import Launch
from .fake_gpu import CUDA, Gpu

# torch installs Triton where CUDA GPUs are supported.
import_or_skip("triton", allow_module_level=True)

PAPER = AugmentConfig.alike(crop=224)


@pytest.mark.parametrize(
    ("images", "config", "dtype"),
    [
        (1, UNEQUAL, torch.float32),
        (37, PAPER, torch.float16),
        (4096, PAPER, torch.bfloat16),
        (5, PAPER.changed(crop=33), torch.bfloat16),  # not a multiple of the word size
    ],
)
def test_kernel_launches_have_dense_aligned_tensors(
    images: int, config: AugmentConfig, dtype: torch.dtype, launches: list[Launch], gpu: Gpu
) -> None:
    """Tensors are dense and 16-byte aligned; otherwise Triton would compile other kernels."""
    height, width = 375, 500
    size, start = np.full((images, 2), (height, width)), np.arange(images) * height * width * 3
    params = draw_views(config, seed=0, epoch=0, index=np.arange(images), size=size)
    pixels = torch.empty(images * height * width * 3, dtype=torch.uint8, device=CUDA)
    with gpu.watched(), CUDA:  # as after torch.set_default_device("cuda")
        crops = crop_views(pixels, start, size, params, config)
        views = photometric(crops, params, config, dtype=dtype)
    assert not gpu.on_the_host()
    for crop, (side, numbers) in zip(crops, config.by_side.items(), strict=True):
        assert crop.shape == (len(numbers), images, side, side, 3) and crop.dtype == torch.uint8
        assert crop.is_cuda and crop.is_contiguous()
    for view, settings in zip(views, config.views, strict=True):
        assert view.shape == (images, 3, settings.crop, settings.crop) and view.dtype == dtype
        assert view.is_cuda and view.is_contiguous(memory_format=torch.channels_last)
    assert len(gpu.copied) == 2 * len(config.by_side)  # one upload per side and stage
    memory = [torch.empty(crop.numel() + 1, dtype=crop.dtype, device=CUDA) for crop in crops]
    photometric(  # as from a user's transform
        tuple(x[1:].view(crop.shape) for x, crop in zip(memory, crops, strict=True)), params, config
    )
    assert launches
    for launch in launches:
        assert 0 < launch.grid[0] < 2**31 and all(0 < n < 2**16 for n in launch.grid[1:])
        for tensor in launch.tensors:
            assert tensor.is_cuda and tensor.is_contiguous()
            assert tensor.storage_offset() * tensor.itemsize % 16 == 0
