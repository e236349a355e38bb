"""Compiling ahead of the first run: what a run compiles else, and keeps, when it starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fastsiam.config.recipes import RECIPES
from fastsiam.console import Console
from fastsiam.kernels import library
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric

_SIDE = 64  # of the images that are cropped: kernels do not depend on it


def warm() -> Iterator[str]:
    """Compile the kernels of the CPU, and those of the GPU if there is one.

    Yields:
        What was compiled, in a line each.

    Raises:
        BackendError: the CPU's kernels are missing and there is no compiler.
    """
    library.kernels()
    yield f"CPU: kernels for {library.kind()}, JPEGs by {library.decoder_name()}"
    if not torch.cuda.is_available():
        return
    for name, make in RECIPES.items():
        augment = make().augment
        size = np.full((2, 2), _SIDE)
        params = draw_views(augment, seed=0, epoch=0, index=np.arange(2), size=size)
        pixels = torch.zeros(2 * 3 * _SIDE**2, dtype=torch.uint8, device="cuda")
        start = np.array([0, 3 * _SIDE**2])
        with Console().status(f"compiling the GPU's kernels of {name}"):
            crops = crop_views(pixels, start, size, params, augment)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                photometric(crops, params, augment, dtype=dtype)
            torch.cuda.synchronize()
        yield f"GPU: crops and photometric stage of {name}"
