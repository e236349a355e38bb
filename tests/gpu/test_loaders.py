"""Loaders for a GPU give the same views as on a CPU, however far the GPU is behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.pipelines import Order, open_store
from tests.pipelines.cases import GRAPH, assert_near, batches, delay_copies, same
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import KINDS, gaps
from tests.processes import python
from tests.views.cases import UNEQUAL

from .conftest import no_synchronisation

pytestmark = pytest.mark.gpu


FFCV = pytest.param("ffcv", marks=pytest.mark.ffcv)
DALI = pytest.param("dali", marks=pytest.mark.dali)


@pytest.mark.parametrize("pipeline", ["torchvision", "native", "memory", FFCV])
def test_views_of_different_sides_match_cpu(pipeline: str, images: Path) -> None:
    """Check two epochs, so that rotating buffers are reused with the crops of all sides."""
    settings: Any = {"augment": UNEQUAL, "batch": 4, "workers": 2}
    here = batches(pipeline, images / "train", 0, 1, **settings)
    there = batches(pipeline, images / "train", 0, 1, device="cuda", **settings)
    for batch in there:
        for view in batch.views:
            assert view.is_cuda and view.is_contiguous(memory_format=torch.channels_last)
    assert_near([batch.to("cpu") for batch in there], here)


@pytest.mark.parametrize("pipeline", ["torchvision", "native", FFCV, DALI])
def test_views_are_correct_if_gpu_lags(
    pipeline: str, images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers rotate on the host while their copies are pending, in full and aborted epochs."""
    settings: Any = {"batch": 4, "workers": 2, "device": "cuda"}
    behind, reference = (loaders(pipeline, images / "train", **settings) for _ in range(2))
    expected = [list(reference.epoch(epoch)) for epoch in range(6)]
    torch.cuda.synchronize()
    delay_copies(monkeypatch)
    for epoch in range(6):
        slow_batches = []
        for batch in behind.epoch(epoch):
            slow_batches.append(batch)
            torch.cuda._sleep(100_000_000)
            if epoch % 2 and len(slow_batches) == 3:
                break
        torch.cuda.synchronize()
        assert same(slow_batches, expected[epoch][: len(slow_batches)])


@pytest.mark.parametrize("pipeline", ["torchvision", DALI])
def test_loaders_never_synchronise(pipeline: str, images: Path, loaders: Loaders) -> None:
    settings: Any = {"augment": UNEQUAL, "workers": 2, "device": "cuda", "dtype": torch.bfloat16}
    epoch = loaders(pipeline, images / "train", batch=4, **settings).epoch(0)
    next(epoch)
    with no_synchronisation():
        assert len(list(epoch)) == 5


JPEG_ENGINE_SCRIPT = """
import sys
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
data = DataConfig(data=sys.argv[1], pipeline="dali", workers=2)
loader = build_loader(data, AugmentConfig.alike(crop=16), batch=8, device="cuda")
next(loader.epoch(0))
loader.close()
"""


SECOND_GPU_SCRIPT = """
import sys, torch
from fastsiam.config import DataConfig
from fastsiam.pipelines import build_loader
torch.cuda.set_device(1)
data = DataConfig(data=sys.argv[1], pipeline="native", workers=2)
loader = build_loader(data, batch=8, device="cuda")
assert {batch.view1.device.index for batch in loader.epoch(0)} == {1}
loader.close()
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_loader_creates_no_context_on_another_gpu(images: Path) -> None:
    result = python(SECOND_GPU_SCRIPT, images / "train")
    assert result.returncode == 0, result.stderr


@pytest.mark.dali
def test_dali_log_shows_jpeg_engine(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvImageCodec's log shows the engine while DALI decodes."""
    if torch.cuda.get_device_capability() not in {(8, 0), (9, 0), (10, 0)}:
        pytest.skip("this GPU may lack a JPEG engine")  # A100, H100, H200 and B200 have one
    monkeypatch.setenv("DALI_NVIMGCODEC_LOG_LEVEL", "3")
    result = python(JPEG_ENGINE_SCRIPT, images / "train")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "nvjpeg_hw_decoder" in output and "num_hw_engines=0" not in output


@pytest.mark.dali
@pytest.mark.parametrize("load", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("kinds", [["landscape"], ["progressive"], sorted(KINDS)], ids=len)
def test_crops_of_every_decoder_are_close_to_pil(
    kinds: list[str], load: float, tmp_path: Path, loaders: Loaders
) -> None:
    """The JPEG engine, the GPU's cores or the CPU decode batches of one or all kinds of images.

    Crops are within 1.5 levels of PIL's on average, because nvJPEG rounds differently from libjpeg.
    Images of a few pixels only count in the average: libjpeg repeats chroma pixels, where other
    decoders may interpolate.
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


@pytest.mark.ffcv
def test_ffcv_gpu_memory_does_not_grow(images: Path, loaders: Loaders) -> None:
    augment, reserved_bytes = AugmentConfig.alike(crop=224), []
    loader = loaders("ffcv", images / "train", augment=augment, workers=2, device="cuda")
    for epoch in range(15):
        for _ in loader.epoch(epoch):
            pass
        torch.cuda.synchronize()
        reserved_bytes.append(torch.cuda.memory_reserved())
    assert reserved_bytes[-1] <= reserved_bytes[4]
