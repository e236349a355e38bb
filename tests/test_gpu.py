"""What only a GPU can show. Run with ``pytest -m gpu``."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

from fastsiam.config import AugmentConfig, DataConfig, TrainConfig
from fastsiam.config.evaluate import FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.evaluate.knn import knn_accuracy
from fastsiam.jobs.evaluate import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.jobs.train import train_here
from fastsiam.methods import build_method
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.geometric import crop_views
from fastsiam.training.log import read_metrics
from fastsiam.training.numerics import FiniteCheck
from fastsiam.training.optim import lr_at
from fastsiam.training.step import TrainingStep, autocast_type
from fastsiam.views.batch import Crops
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import photometric
from tests.pipelines.test_pipelines import readable
from tests.rank_jobs import knn_problem
from tests.views.test_cuda_kernels import assert_equal_pil, assert_equal_reference, crops_of

from .conftest import with_settings

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(small: TrainConfig) -> TrainConfig:
    return with_settings(small, device="cuda", precision="auto")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("compiled", ["off", "on", "graphs"])
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_a_step_never_waits_for_the_device(
    optimizer: str, compiled: str, precision: str, gpu: TrainConfig
) -> None:
    """Loading from memory, augmenting, a whole step: synchronisation raises an error."""
    config = with_settings(
        gpu,
        precision=precision,
        optimizer=optimizer,
        compile="off" if compiled == "off" else "on",
        cuda_graphs=compiled == "graphs",
    )
    place = Place(0, 1, torch.device("cuda", 0))
    step = TrainingStep(config, build_method(config.model), place)
    assert "cannot" not in step.prepare()
    loader = build_loader(
        config.data,
        config.augment,
        batch=8,
        device=place.device,
        dtype=autocast_type(config, place),
    )
    finite, batches = FiniteCheck(place.device), loader.epoch(0)
    for _ in range(3):  # CUDA graphs are recorded in the second step
        step(next(batches), lr_at(config.optim, 0, loader.steps))
    batches = loader.epoch(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, batch in enumerate(batches, start=1):
            loss, _ = step(batch, lr_at(config.optim, number, loader.steps))
            finite.note(number, loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert finite.verdict() is None


@pytest.mark.parametrize(("views", "compiled"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(16, 6, 5, 5), (16, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_bn_equals_batch_norm(
    dtype: torch.dtype, shape: tuple[int, ...], affine: bool, views: int, compiled: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Through torch's kernels, our formula and the compiler, over NCCL in a group of one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        kind: Any = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
        theirs = kind(6, affine=affine, device="cuda")
        ours = copy.deepcopy(theirs)
        use_view_batch_norm(ours, views=views, group=dist.group.WORLD)
        function = torch.compile(ours, fullgraph=True) if compiled else ours
        x = (torch.randn(shape, device="cuda") * 3 + 2).to(dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        weight, found = torch.randn(shape, device="cuda"), []
        for normalise in (function, lambda x: torch.cat([theirs(v) for v in x.chunk(views)])):
            own = x.clone().requires_grad_()
            out = normalise(own)
            (out.float() * weight).sum().backward()
            found.append((out.detach(), own.grad))
        close = 1e-4 if dtype == torch.float32 else 0.05
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=close, atol=close)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=10 * close)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()


def test_a_compiled_step_is_the_eager_one(gpu: TrainConfig) -> None:
    """Losses of 20 steps in float32, with CUDA graphs and without."""
    place = Place(0, 1, torch.device("cuda", 0))
    curves = []
    for settings in ({"compile": "off"}, {"compile": "on"}, {"compile": "on", "cuda_graphs": True}):
        config = with_settings(gpu, precision="fp32", tf32=False, **settings)
        torch.manual_seed(0)
        step = TrainingStep(config, build_method(config.model), place)
        assert "cannot" not in step.prepare() and step.compiled == (settings["compile"] == "on")
        loader = build_loader(config.data, config.augment, batch=8, device=place.device)
        batches = [batch for epoch in range(7) for batch in loader.epoch(epoch)][:20]
        rates = lr_at(config.optim, 0, loader.steps)
        curves.append([step(batch, rates)[0].item() for batch in batches])
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], atol=2e-3)


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


@pytest.fixture(scope="module")
def photographs(real_images: Path) -> list[Image.Image]:
    return [Image.open(file).convert("RGB") for file in sorted(real_images.glob("*/*.JPEG"))[:64]]


def on_the_gpu(function: Any, given: Tensor | Crops, *args: Any, **options: Any) -> Any:
    there = given.cuda() if isinstance(given, Tensor) else tuple(part.cuda() for part in given)
    result = function(there, *args, **options)
    return result.cpu() if isinstance(result, Tensor) else tuple(view.cpu() for view in result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sigma", [2.0, 6.0])
def test_the_photometric_kernels_equal_the_reference(
    sigma: float, dtype: torch.dtype, photographs: list[Image.Image]
) -> None:
    """To the last bit, at full size."""
    config = AugmentConfig.alike(hue=0.5, brightness=0.8, blur_sigma_min=0.05, blur_sigma_max=sigma)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(32), size=[(224, 224)] * 32)
    assert_equal_reference(on_the_gpu, crops_of(photographs, 224, 32), params, config, dtype)


@pytest.mark.parametrize("side", [32, 224])
def test_the_crop_kernels_equal_pil(side: int, photographs: list[Image.Image]) -> None:
    """To the last bit, from whole photographs."""
    assert_equal_pil(on_the_gpu, photographs, side)


def test_the_kernels_never_wait_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of any size with any parameters; 208 is a side that no other test has."""
    import triton

    new: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **kernel: new.append(kernel["repr"])
    )
    config, height, width = AugmentConfig.alike(crop=208), 375, 500
    pixels = torch.randint(0, 256, (20 * height * width * 3,), dtype=torch.uint8, device="cuda")
    try:
        for seed in range(8):
            n = 10 + seed
            size, start = np.array([(height, width)] * n), np.arange(n) * height * width * 3
            params = draw_views(config, seed=seed, epoch=0, index=np.arange(n), size=size)
            crops = crop_views(pixels, start, size, params, config)
            photometric(crops, params, config, dtype=torch.bfloat16)
            assert len(new) == 7, new  # in the first batch, and none later
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


@pytest.mark.parametrize("pipeline", ["torchvision", "dali"])
def test_evaluations_are_those_of_the_cpu(pipeline: Any, gpu: TrainConfig) -> None:
    """kNN, linear evaluation and fine-tuning, in float32; DALI's crops differ by a level or so."""
    run = train_here(with_settings(gpu, max_steps=3, precision="fp32", tf32=False), "imagenet")
    places = [Place(0, 1, torch.device(device)) for device in ("cuda", "cpu")]
    shared: Any = {"workers": 0, "pipeline": pipeline, "precision": "fp32"}
    torch.backends.cudnn.allow_tf32 = False
    few = {"epochs": 3, "batch": 8, **shared}
    cases: list[tuple[Any, Any]] = [
        (evaluate_knn, KnnConfig(k="1,5", **shared)),
        (evaluate_linear, LinearConfig(lrs="0.1,10", cached=True, **few)),
        (evaluate_linear, LinearConfig(lrs="0.1,10", **few)),
    ]
    for evaluate, config in cases:
        there, here = (evaluate(run, config, place) for place in places)
        for one, other in zip(there["results"], here["results"], strict=True):
            assert one["top1"] == pytest.approx(other["top1"], abs=17)  # two of twelve images
        assert there["network"]["fingerprint"] == here["network"]["fingerprint"]
    for precision in ("fp32", "fp16"):  # with fp16 the scaler's first step is usually skipped
        finetune = FinetuneConfig(**few | {"precision": precision, "scale_min": 0.5, "lr": 3.0})
        record = evaluate_finetuned(run, replace(finetune, epochs=30), places[0])
        assert record["images_validated"] == 12 and record["best"]["top1"] > 60  # chance is 33


def test_knn_is_exact_on_a_gpu() -> None:
    bank, labels, queries, truth = knn_problem()
    votes = [(1, 0.2), (20, 0.07), (403, 0.1)]
    results = [
        knn_accuracy(
            [(bank.to(device), labels.to(device))],
            queries.to(device),
            truth.to(device),
            votes=votes,
            classes=7,
            block=64,
        )
        for device in ("cuda", "cpu")
    ]
    assert results[0] == results[1]
