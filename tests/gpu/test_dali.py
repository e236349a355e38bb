"""DALI on a GPU: crops close to PIL's, decoding of all formats, and constant memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import open_store
from tests.conftest import write_images
from tests.pipelines.cases import GRAPH
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import gaps
from tests.sources import encoded

pytestmark = [pytest.mark.dali, pytest.mark.gpu]


def test_gpu_crops_are_close_to_pil(real_images: Path, loaders: Loaders) -> None:
    """nvJPEG's transform and colour conversion round differently from libjpeg's."""
    store = open_store(real_images, "train")
    loader = loaders(
        GRAPH, real_images, batch=100, augment=AugmentConfig.alike(crop=224), device="cuda"
    )
    gap = gaps(loader, store, 224, skip=3)
    assert gap.mean() < 1
    assert gap.mean((2, 3, 4)).max() < 3
    assert (gap[:, :, 4:-4, 4:-4] > 4).mean() < 0.01


@pytest.mark.alone
def test_gpu_memory_does_not_grow(tmp_path: Path, loaders: Loaders) -> None:
    root = write_images(tmp_path, each=16, side=320)
    before = torch.cuda.mem_get_info()[0]
    loader = loaders(GRAPH, root, batch=16, augment=AugmentConfig.alike(crop=64), device="cuda")
    free = []
    for epoch in range(10):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[3] - min(free[4:]) < 64 * 2**20
    loader.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 1024 * 2**20


@pytest.mark.usefixtures("trusting")
def test_gif_falls_back_to_pil_and_truncated_gif_raises(images: Path, loaders: Loaders) -> None:
    path = images / "train" / "class1" / "003.jpg"
    path.write_bytes(encoded(Image.open(path), "GIF"))
    loader = loaders(GRAPH, images / "train", batch=4, device="cuda")
    assert len(list(loader.epoch(0))) == 6
    original = path.read_bytes()
    path.write_bytes(original[:-20])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
    path.write_bytes(original)
    assert len(list(loader.epoch(0))) == 6
