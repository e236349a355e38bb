"""PIL in DataLoader workers: torchvision's own pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import (
    Order,
    build_loader,
    open_store,
)
from fastsiam.pipelines.torchvision_backend import apply_view
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import normalized
from tests.views.cases import UNEQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_level_is_normalised_as_torchvision_does(dtype: torch.dtype) -> None:
    """To the last bit of float32, and then rounded."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    config = AugmentConfig()
    theirs = TF.normalize(TF.to_tensor(levels), list(config.mean), list(config.std)).to(dtype)
    ours = normalized(torch.from_numpy(levels)[None], config, dtype=dtype)
    assert ours.dtype == dtype and ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_torchvisions_to_the_last_bit(workers: int, images: Path) -> None:
    """Each as ``ToTensor`` and ``Normalize`` make it of the PIL image."""
    store = open_store(images / "train", "train")
    order = Order(images=24, batch=8, seed=0)
    data = DataConfig(data=str(images / "train"), pipeline="torchvision", workers=workers)
    loader = build_loader(data, UNEQUAL, batch=8)
    for step, batch in enumerate(loader.epoch(1)):
        index = order.indices(1, step)
        decoded: list[Image.Image] = [store.decode(i) for i in index.tolist()]
        size = [(image.height, image.width) for image in decoded]
        params = draw_views(UNEQUAL, seed=0, epoch=1, index=index, size=size)
        for number, views in enumerate(batch.views):
            for row, image in enumerate(decoded):
                made = TF.to_tensor(apply_view(image, params, number, row, UNEQUAL))
                made = TF.normalize(made, list(UNEQUAL.mean), list(UNEQUAL.std))
                assert torch.equal(views[row], made)
    loader.close()
