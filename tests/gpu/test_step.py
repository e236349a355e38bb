"""The training step on a GPU never synchronises, and compiling changes only rounding."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.evaluate.features import frozen_output
from fastsiam.methods import build_method
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.model.numerics import FiniteCheck, autocast_type
from fastsiam.pipelines import build_loader
from fastsiam.run.run_folder import RunFolder
from fastsiam.train.clock import Clock
from fastsiam.train.step import TrainingStep
from fastsiam.train.trainer import Trainer
from fastsiam.views.batch import Loader
from tests.configs import with_settings
from tests.methods.variants import RELATED

from .conftest import no_synchronisation

pytestmark = pytest.mark.gpu

PLACE = Place(0, 1, torch.device("cuda", 0))


def prepared_step(config: TrainConfig) -> TrainingStep:
    """Build the step of a run on 24 images, and prepare it."""
    step = TrainingStep(config, build_method(config.model, images=24), PLACE, steps_per_epoch=3)
    assert step.prepare().startswith("compiled") == (config.step.compile == "on")
    return step


def loader_of(config: TrainConfig) -> Loader:
    """Open a run's loader with the dtype in which the step computes."""
    return build_loader(
        config.data,
        config.augment,
        batch=config.optim.batch,
        device=PLACE.device,
        dtype=autocast_type(config.numerics.precision, PLACE.device),
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compiled", ["off", "on", "graphs"])
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_step_never_synchronises(
    optimizer: str, compiled: str, precision: str, gpu: TrainConfig
) -> None:
    """Synchronising raises an error while loading from memory, augmenting and training."""
    config = with_settings(
        gpu,
        precision=precision,
        optimizer=optimizer,
        compile="off" if compiled == "off" else "on",
        cuda_graphs=compiled == "graphs",
    )
    step, loader = prepared_step(config), loader_of(config)
    finite, batches, clock = FiniteCheck(PLACE.device), loader.epoch(0), Clock(device=PLACE.device)
    for _ in range(3):  # sets up the loader's kernels and the optimizer's state
        step(next(batches), at=0)
    batches = loader.epoch(1)
    with no_synchronisation():
        clock.resume()
        for number, batch in enumerate(clock.over(batches), start=1):
            loss, _ = step(batch, at=number)
            finite.note(number, loss)
    assert finite.verdict() is None
    clock.pause()
    assert 0 < clock.read(8)["data_wait"] < 1


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", RELATED)
def test_step_of_related_methods_never_synchronises(
    name: str, precision: str, compiled: str, gpu: TrainConfig
) -> None:
    """Momentum encoders, queues and frozen prototypes, which start to move in the fourth step."""
    config = RELATED[name].applied(gpu, precision=precision, compile=compiled)
    step, loader = prepared_step(config), loader_of(config)
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
    step(batches[0], at=0)
    with no_synchronisation():
        losses = [step(batch, at=at)[0] for at, batch in enumerate(batches[1:], start=1)]
    assert torch.stack(losses).isfinite().all() or "no stop-gradient" in name


@pytest.mark.parametrize(("views", "compiled"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(16, 6, 5, 5), (16, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_bn_equals_batch_norm(
    dtype: torch.dtype, shape: tuple[int, ...], affine: bool, views: int, compiled: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Run torch's kernels, fastsiam's formula and the compiler over NCCL in a group of one rank."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        kind: Any = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
        theirs = kind(6, affine=affine, device="cuda")
        ours = copy.deepcopy(theirs)
        use_view_batch_norm(ours, images=16 // views, group=dist.group.WORLD)
        function = torch.compile(ours, fullgraph=True) if compiled else ours
        x = (torch.randn(shape, device="cuda") * 3 + 2).to(dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        weight, results = torch.randn(shape, device="cuda"), []
        for normalise in (function, lambda x: torch.cat([theirs(v) for v in x.chunk(views)])):
            inputs = x.clone().requires_grad_()
            out = normalise(inputs)
            (out.float() * weight).sum().backward()
            results.append((out.detach(), inputs.grad))
        close = 1e-4 if dtype == torch.float32 else 0.05
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=close, atol=close)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=10 * close)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["default", *RELATED])
def test_compiled_steps_match_eager_steps(name: str, gpu: TrainConfig) -> None:
    """Compare the losses of six float32 steps, until after the queues come into use.

    For SimSiam, compare 20 steps at a tenth of the rate, also with CUDA graphs. With BN over 8
    images, training doubles a rounding error every few steps.
    """
    curves, simsiam = [], name == "default"
    modes: list[dict[str, Any]] = [{"compile": "off"}, {"compile": "on"}]
    modes += [{"compile": "on", "cuda_graphs": True}] if simsiam else []
    for mode in modes:
        settings: dict[str, Any] = {"precision": "fp32", "tf32": False, "lr": 0.05, **mode}
        config = (
            with_settings(gpu, **settings) if simsiam else RELATED[name].applied(gpu, **settings)
        )
        torch.manual_seed(0)
        step, loader = prepared_step(config), loader_of(config)
        batches = [batch for epoch in range(7) for batch in loader.epoch(epoch)]
        batches = batches[: 20 if simsiam else 6]
        curves.append([step(batch, at=at)[0].item() for at, batch in enumerate(batches)])
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], atol=2e-3 if simsiam else 5e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_cuda_graphs_are_captured_only_in_prepare(
    precision: str, gpu: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders' threads may do what graph capture forbids. Loading a checkpoint captures nothing."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    calls: list[str] = []
    for name in ("run_eager", "record_function", "execute_node"):  # warmup, capture, replay
        original = getattr(CUDAGraphTreeManager, name)

        def record_call(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(CUDAGraphTreeManager, name, record_call)
    config = with_settings(gpu, precision=precision, compile="on", cuda_graphs=True)
    step = prepared_step(config)
    assert calls == ["run_eager"] * 2 + ["record_function"] * 2 + ["execute_node"] * 2
    step.load(**copy.deepcopy(step.state()))
    loader = loader_of(config)
    calls.clear()
    for epoch in range(2):
        for number, batch in enumerate(loader.epoch(epoch)):
            loss, embedding = step(batch, at=3 * epoch + number)
        assert loss.isfinite() and embedding.isfinite().all()
        step.method.eval()
        dtype = autocast_type(config.numerics.precision, PLACE.device)
        frozen_output(step.method.backbone, batch.view1, dtype=dtype)  # an evaluation in between
        step.method.train()
    assert calls == ["execute_node"] * 2 * 6


def test_log_point_synchronises_twice(gpu: TrainConfig, tmp_path: Path) -> None:
    step = TrainingStep(gpu, build_method(gpu.model), PLACE, steps_per_epoch=3)
    loader: Any = SimpleNamespace()
    batch: Any = SimpleNamespace(digest=0)
    trainer = Trainer(step, loader, folder=RunFolder(tmp_path, console=Console(quiet=True)))
    loss, z = torch.zeros((), device="cuda"), torch.randn(64, 128, device="cuda")
    trainer.metrics.note(0, batch, z)
    trainer.finite.note(1, loss)
    trainer.metrics.log(1, loss, z)  # sets up everything that is only set up once
    trainer.metrics.settle()
    torch.set_warn_always(True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            trainer.metrics.note(1, batch, z)
            trainer.finite.note(2, loss)
            assert not waits
            trainer.check_finite()
            assert len(waits) == 1
            trainer.metrics.log(2, loss, z)
            trainer.metrics.settle()
            assert len(waits) == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(False)
        trainer.close()
