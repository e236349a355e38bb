"""Comparisons of the GPU kernels' crops and views with PIL's and the reference's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.pipelines import crop_kernels
from fastsiam.pipelines.cuts import cut_views
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import cuda as photometric_cuda
from fastsiam.views.photometric import reference
from tests.views.cases import pil_crop

Run = Callable[..., Any]
"""Calls a function where its kernels can run. Its first argument is one or more CPU tensors."""


def crops_of(photographs: list[Image.Image], side: int, count: int) -> Tensor:
    """Return (2, count, side, side, 3) crops of photographs; the last one of each view is noise."""
    small = np.stack([np.asarray(photo.resize((side, side))) for photo in photographs[: 2 * count]])
    small[[count - 1, -1]] = np.random.default_rng(0).integers(0, 256, (2, side, side, 3))
    return torch.from_numpy(small).view(2, count, side, side, 3)


def assert_equal_reference(
    run: Run,
    crops: Crops,
    params: ViewParams,
    config: AugmentConfig,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    views = run(photometric_cuda.photometric, crops, params, config, dtype=dtype)
    expected = reference.photometric(crops, params, config, dtype=dtype)
    for ours, theirs in zip(views, expected, strict=True):
        assert ours.dtype == dtype
        assert ours.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours, theirs)
    return expected


def crops_of_sides(photographs: list[Image.Image], count: int, config: AugmentConfig) -> Crops:
    """Return ``count`` crops for views of different sides."""
    sides = config.by_side.items()
    return tuple(
        torch.cat([crops_of(photographs[view:], side, count)[:1] for view in views])
        for side, views in sides
    )


def assert_equal_pil(
    run: Run, images: list[Image.Image], side: int, **augment: float
) -> ViewParams:
    """Compare crops of the images in reverse order with PIL's; return the parameters."""
    pixels = torch.from_numpy(np.concatenate([np.asarray(image).ravel() for image in images]))
    size = np.array([(image.height, image.width) for image in images])
    start = np.cumsum(3 * size.prod(1)) - 3 * size.prod(1)
    chosen = np.arange(len(images))[::-1]
    config = AugmentConfig.alike(crop=side, **augment)  # type: ignore[arg-type]
    params = draw_views(config, seed=3, epoch=0, index=chosen, size=size[chosen])
    (cuts,) = cut_views(params, config)
    crops = run(crop_kernels.crop_side, pixels, start[chosen], size[chosen], cuts, side)
    assert crops.shape == (2, len(images), side, side, 3) and crops.dtype == torch.uint8
    for view in range(2):
        for row, i in enumerate(chosen):
            expected = pil_crop(images[i], params.box[view, row], params.flip[view, row], side)
            difference = np.abs(crops[view, row].numpy().astype(int) - expected).max()
            assert difference <= (0 if int(PIL.__version__.split(".")[0]) >= 13 else 1), (view, i)
    return params
