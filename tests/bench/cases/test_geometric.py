"""Both ways to crops make the same ones, within torchvision's rounding on tensors."""

from __future__ import annotations

import numpy as np
import torch

from fastsiam.bench.cases.geometric import _by_torchvision
from fastsiam.config import AugmentConfig
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import draw_views


def test_torchvision_does_the_same_work() -> None:
    augment, size = AugmentConfig.alike(crop=32), np.array([(75, 100)])
    params = draw_views(augment, seed=0, epoch=0, index=np.arange(1), size=size)
    image = torch.randint(0, 256, (75, 100, 3), dtype=torch.uint8)
    (crops,) = crop_views(image.flatten(), np.array([0]), size, params, augment)
    for view in range(2):
        theirs = _by_torchvision(image.permute(2, 0, 1), params, view, 0, 32).permute(1, 2, 0)
        assert (crops[view, 0].int() - theirs.int()).abs().max() <= 2
