"""Loaders that feed a GPU: the same views as on a CPU, whatever the GPU is behind with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import AugmentConfig, DataConfig, TrainConfig
from fastsiam.pipelines import build_loader
from tests.conftest import with_settings
from tests.pipelines.test_pipelines import readable
from tests.views.cases import UNEQUAL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pipeline", ["memory", "torchvision"])
def test_views_equal_the_cpus(pipeline: str, gpu: TrainConfig) -> None:
    """The reference on a GPU: equal to the CPU's to the last level."""
    config = with_settings(gpu, pipeline=pipeline)
    batches = []
    for device in ("cpu", "cuda"):
        loader = build_loader(config.data, config.augment, batch=24, device=device)
        batches.append(next(iter(loader.epoch(0))))
        loader.close()
    for view in ("view1", "view2"):
        a, b = getattr(batches[0], view), getattr(batches[1], view).cpu()
        assert b.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "pipeline", ["torchvision", "memory", pytest.param("ffcv", marks=pytest.mark.ffcv)]
)
def test_views_of_different_sides_equal_the_cpus(pipeline: Any, images: Path) -> None:
    """Two epochs: buffers that rotate hold the crops of all sides."""
    root, batches = readable(pipeline, images / "train"), []
    for device in ("cpu", "cuda"):
        data = DataConfig(data=str(root), pipeline=pipeline, workers=2)
        loader = build_loader(data, UNEQUAL, batch=4, device=device)
        batches.append([batch for epoch in range(2) for batch in loader.epoch(epoch)])
        loader.close()
    for here, there in zip(*batches, strict=True):
        assert torch.equal(here.index, there.index.cpu())
        assert torch.equal(here.label, there.label.cpu())
        for a, b in zip(here.views, there.views, strict=True):
            assert b.is_cuda and b.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(a, b.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.ffcv
def test_ffcvs_crops_survive_a_gpu_that_is_behind(images: Path) -> None:
    """Buffers rotate on the host while their copies wait, in whole epochs and abandoned ones."""
    data = DataConfig(data=str(readable("ffcv", images / "train")), pipeline="ffcv", workers=2)
    augment = AugmentConfig.alike(crop=16)
    host = build_loader(data, augment, batch=4)
    device = build_loader(data, augment, batch=4, device="cuda")
    for epoch in range(6):
        expected = [crops.clone() for _, _, (crops,) in host.crops(epoch)]  # type: ignore[attr-defined]
        found = []
        for _, _, (crops,) in device.crops(epoch):  # type: ignore[attr-defined]
            torch.cuda._sleep(50_000_000)
            found.append(crops.clone())
            if epoch % 2 and len(found) == 3:
                break
        for ours, theirs in zip(found, expected, strict=False):
            assert torch.equal(ours.cpu(), theirs)
    host.close()
    device.close()


@pytest.mark.ffcv
def test_ffcv_holds_no_more_gpu_memory_with_every_epoch(images: Path) -> None:
    data = DataConfig(data=str(readable("ffcv", images / "train")), pipeline="ffcv", workers=2)
    loader = build_loader(data, AugmentConfig.alike(crop=224), batch=8, device="cuda")
    held = []
    for epoch in range(15):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= held[4]
    loader.close()
