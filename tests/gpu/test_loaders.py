"""Loaders that feed a GPU: the same views as on a CPU, whatever the GPU is behind with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.distributed import Place
from fastsiam.methods import build_method
from fastsiam.pipelines import Order, build_loader, open_store
from fastsiam.train.step import TrainingStep
from tests.configs import with_settings
from tests.conftest import ROOT, write_images
from tests.pipelines.cases import GRAPH, assert_near, batches, readable, same
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import KINDS, gaps
from tests.views.cases import UNEQUAL

pytestmark = pytest.mark.gpu


FFCV = pytest.param("ffcv", marks=pytest.mark.ffcv)
DALI = pytest.param("dali", marks=pytest.mark.dali)


@pytest.mark.parametrize("pipeline", ["torchvision", "native", "memory", FFCV])
def test_views_of_different_sides_equal_the_cpus(pipeline: str, images: Path) -> None:
    """Two epochs: buffers that rotate hold the crops of all sides."""
    how: Any = {"augment": UNEQUAL, "batch": 4, "workers": 2}
    here = batches(pipeline, images / "train", 0, 1, **how)
    there = batches(pipeline, images / "train", 0, 1, device="cuda", **how)
    for batch in there:
        for view in batch.views:
            assert view.is_cuda and view.is_contiguous(memory_format=torch.channels_last)
    assert_near([batch.to("cpu") for batch in there], here)


@pytest.mark.parametrize("pipeline", ["torchvision", "native", FFCV, DALI])
def test_views_survive_a_gpu_that_is_behind(pipeline: str, images: Path, loaders: Loaders) -> None:
    """Buffers rotate on the host while their copies wait, in whole epochs and abandoned ones."""
    how: Any = {"batch": 4, "workers": 2, "device": "cuda"}
    behind, beside = (loaders(pipeline, images / "train", **how) for _ in range(2))
    for epoch in range(6):
        found = []
        for batch in behind.epoch(epoch):
            found.append(batch)
            torch.cuda._sleep(100_000_000)
            if epoch % 2 and len(found) == 3:
                break
        torch.cuda.synchronize()
        assert same(found, list(beside.epoch(epoch))[: len(found)])


@pytest.mark.parametrize("pipeline", ["torchvision", DALI])
def test_who_makes_views_or_crops_never_waits_for_the_device(
    pipeline: str, images: Path, loaders: Loaders
) -> None:
    how: Any = {"augment": UNEQUAL, "workers": 2, "device": "cuda", "dtype": torch.bfloat16}
    epoch = loaders(pipeline, images / "train", batch=4, **how).epoch(0)
    next(epoch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(epoch)) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")


ENGINE = """
import sys, torch
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
data = DataConfig(data=sys.argv[1], pipeline="dali", workers=2)
loader = build_loader(data, AugmentConfig.alike(crop=16), batch=8, device="cuda")
next(loader.epoch(0))
loader.close()
"""


@pytest.mark.dali
def test_the_jpeg_engine_is_engaged(images: Path) -> None:
    """By what nvImageCodec notes while DALI has it decode."""
    if torch.cuda.get_device_capability() not in {(8, 0), (9, 0), (10, 0)}:
        pytest.skip("this GPU need not have a JPEG engine")  # A100, H100 and H200, B200 have
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(images / "train")],
        env={**os.environ, "DALI_NVIMGCODEC_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    noted = done.stdout + done.stderr
    assert done.returncode == 0, noted
    assert "nvjpeg_hw_decoder" in noted and "num_hw_engines=0" not in noted


@pytest.mark.dali
@pytest.mark.parametrize("load", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("kinds", [["landscape"], ["progressive"], sorted(KINDS)], ids=len)
def test_whatever_decodes_the_crops_are_pils(
    kinds: list[str], load: float, tmp_path: Path, loaders: Loaders
) -> None:
    """The engine, the GPU's cores or the CPU, of a batch of one kind of image or of all.

    In the mean, within a level and a half: nvJPEG rounds otherwise than libjpeg does. Images of a
    few pixels count in the mean alone: libjpeg repeats their two pixels of a colour, where another
    decoder may interpolate.
    """
    for number in range(32):
        (tmp_path / f"{number}.jpg").write_bytes(KINDS[kinds[number % len(kinds)]](number))
    store, order = open_store(tmp_path, "train"), Order(images=32, batch=16, seed=0)
    augment = AugmentConfig.alike(crop=48)
    loader = loaders(
        GRAPH, tmp_path, batch=16, augment=augment, device="cuda", dali_hw_decoder_load=load
    )
    gap = gaps(loader, store, 48, epochs=2)
    assert gap.shape[1] == 64
    steps = [order.indices(epoch, step) for epoch in range(2) for step in range(order.steps)]
    made_as = [kinds[int(Path(store.name(i)).stem) % len(kinds)] for i in np.concatenate(steps)]
    large = np.array([kind not in ("tiny", "one pixel") for kind in made_as])
    assert gap.mean() < 1.5 and gap[:, large].mean((2, 3, 4)).max() < 5


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three batches of the paper's, of 256 pixels."""
    return write_images(tmp_path_factory.mktemp("many") / "train", classes=4, each=384, side=256)


@pytest.mark.parametrize("pipeline", ["native", DALI, FFCV])
def test_a_real_step_is_fed_with_the_papers_batch(pipeline: str, many: Path) -> None:
    """ResNet-50 trains on 512 images, and meets the same views as where everybody waits."""
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of free GPU memory")
    place = Place(0, 1, torch.device("cuda", 0))
    root = readable(pipeline, many)
    config = with_settings(
        RECIPES["imagenet"](),
        data=str(root),
        pipeline=pipeline,
        workers=8,
        compile="off",
        precision="bf16",
    )
    step = TrainingStep(config, build_method(config.model), place, steps_per_epoch=3)
    step.prepare()
    loader = build_loader(
        config.data, config.augment, batch=512, device=place.device, dtype=torch.bfloat16
    )
    seen = dict[bool, list[torch.Tensor]]()
    for waits in (False, True):
        made, losses = seen.setdefault(waits, []), []
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                if waits:
                    torch.cuda.synchronize()
                losses.append(step(batch, at=0)[0])
                made += [view.double().sum((1, 2, 3)) for view in batch.views]
                assert batch.view1.shape == (512, 3, 224, 224)
        assert len(losses) == 6 and torch.stack(losses).isfinite().all()
    for free, waited in zip(*seen.values(), strict=True):
        assert torch.equal(free, waited)
    loader.close()


@pytest.mark.ffcv
def test_ffcv_holds_no_more_gpu_memory_with_every_epoch(images: Path, loaders: Loaders) -> None:
    augment, held = AugmentConfig.alike(crop=224), []
    loader = loaders("ffcv", images / "train", augment=augment, workers=2, device="cuda")
    for epoch in range(15):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= held[4]
