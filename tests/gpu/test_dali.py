"""DALI on a GPU: near PIL, never behind, never growing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import open_store
from tests.conftest import write_images
from tests.pipelines.dali_cases import Loaders, gaps, pil_crops
from tests.sources import encoded
from tests.views.cases import UNEQUAL

pytestmark = [pytest.mark.dali, pytest.mark.gpu]


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_crops_of_the_gpu_are_near_pils(
    gpu: torch.device, real_images: Path, loaders: Loaders
) -> None:
    """nvJPEG's transform and colours round otherwise than libjpeg's."""
    store = open_store(real_images, "train")
    loader = loaders(store, batch=100, augment=AugmentConfig.alike(crop=224), device=gpu)
    gap = gaps(loader, store, 224, skip=3)
    assert gap.mean() < 1
    assert gap.mean((2, 3, 4)).max() < 3
    assert (gap[:, :, 4:-4, 4:-4] > 4).mean() < 0.01


def test_views_of_different_sides_on_the_gpu(
    gpu: torch.device, real_images: Path, loaders: Loaders
) -> None:
    store = open_store(real_images, "train")
    augment = UNEQUAL.changed(scale_min=0.3, scale_max=1.0)
    loader = loaders(store, batch=100, augment=augment, device=gpu)
    for index, params, crops in loader.crops(0, skip=3):
        for own, (side, views) in zip(crops, augment.by_side.items(), strict=True):
            theirs = pil_crops(store, index, params.views(views), side)
            assert own.is_cuda
            assert np.abs(own.cpu().numpy().astype(np.int64) - theirs).mean() < 1.5
    for batch in loader.epoch(0, skip=3):
        assert [view.shape[2] for view in batch.views] == [24, 12, 24, 12, 12]


def test_a_gpu_that_is_behind_loses_no_crops(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    """The host runs ahead of the device: memory must not be used again before it was read."""
    batches = dict[str, list[torch.Tensor]]()
    for pace in ("slow", "fast"):
        loader = loaders(images / "train", batch=4, device=gpu)
        made = batches[pace] = []
        for _ in range(3):
            for batch in loader.epoch(0):
                made += [batch.view1, batch.view2]
                if pace == "slow":
                    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(*batches.values(), strict=True))


def test_torch_never_waits_for_the_device(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    loader = loaders(images / "train", batch=4, device=gpu)
    batches = loader.epoch(0)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(batches)) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_of_the_gpu_does_not_grow(
    gpu: torch.device, tmp_path: Path, loaders: Loaders
) -> None:
    root = write_images(tmp_path, each=16, side=320)
    before = torch.cuda.mem_get_info(gpu)[0]
    loader = loaders(root, batch=16, augment=AugmentConfig.alike(crop=64), device=gpu)
    free = []
    for epoch in range(10):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info(gpu)[0])
    assert free[3] - min(free[4:]) < 64 * 2**20
    loader.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info(gpu)[0] < 1024 * 2**20


@pytest.mark.usefixtures("trusting")
def test_what_only_nvjpeg_refuses_is_decoded_by_pil(
    gpu: torch.device, images: Path, loaders: Loaders
) -> None:
    path = images / "train" / "class1" / "003.jpg"
    path.write_bytes(encoded(Image.open(path), "GIF"))
    loader = loaders(images / "train", batch=4, device=gpu)
    assert len(list(loader.epoch(0))) == 6
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
    path.write_bytes(whole)
    assert len(list(loader.epoch(0))) == 6
