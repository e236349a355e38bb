"""What only a GPU can show. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place
from fastsiam.methods import build_method
from fastsiam.metrics import FiniteCheck, read_metrics
from fastsiam.optim import build_optimizer, lr_at, set_lr
from fastsiam.pipelines import build_loader
from fastsiam.run import train_here
from fastsiam.train import autocast_type, train_step

from .conftest import with_settings

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(small: TrainConfig) -> TrainConfig:
    return with_settings(small, device="cuda", precision="auto")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_step_never_waits_for_the_device(precision: str, gpu: TrainConfig) -> None:
    """Loading from memory, augmenting, a whole step: synchronisation raises an error."""
    config = with_settings(gpu, precision=precision)
    place = Place(0, 1, torch.device("cuda", 0))
    method = build_method(config.model).to(place.device).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(config.optim, method.param_groups())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    loader = build_loader(
        config.data,
        config.augment,
        batch=8,
        device=place.device,
        dtype=autocast_type(config, place),
    )
    finite, batches = FiniteCheck(place.device), loader.epoch(0)
    train_step(method, next(batches), optimizer, scaler, config, place)  # warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(batches, start=1):
            set_lr(optimizer, lr_at(config.optim, step, loader.steps))
            loss, _ = train_step(method, batch, optimizer, scaler, config, place)
            finite.note(step, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finite.verdict() is None


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


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_training_runs_and_resumes(precision: str, gpu: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(gpu, precision=precision)
    train_here(with_settings(config, max_steps=5), "imagenet")
    run = train_here(config, "imagenet")
    steps = [line["step"] for line in read_metrics(run) if line["kind"] == "train"]
    assert steps == list(range(1, 13))
