"""The training step on a fake GPU: it never waits, and devices, shapes and dtypes are right.

Values are tested in tests/train and tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastsiam.config import AugmentConfig, TrainConfig
from fastsiam.distributed import Place
from fastsiam.methods import Output, build_method
from fastsiam.model.numerics import FiniteCheck
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch
from tests.configs import with_model_settings, with_settings
from tests.methods.variants import ALL_CASES
from tests.rank_jobs import CONFIG

from .fake_gpu import CUDA, Gpu, HostWait

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IMAGES = 24


def batch_of(config: TrainConfig, dtype: torch.dtype) -> Batch:
    """Return a batch like a loader's."""
    sides = [view.crop for view in config.augment.views]
    views = (torch.empty(IMAGES, s, s, 3, device=CUDA, dtype=dtype) for s in sides)
    index = torch.arange(IMAGES, device=CUDA)
    return Batch(tuple(view.permute(0, 3, 1, 2) for view in views), index, index)


def step_of(config: TrainConfig) -> TrainingStep:
    method = build_method(config.model, images=100)
    step = TrainingStep(config, method, Place(0, 1, CUDA), steps_per_epoch=10)
    assert step.prepare() == ""
    return step


def take_steps(config: TrainConfig, gpu: Gpu, *, steps: int = 2) -> TrainingStep:
    """Take steps and check the properties that are the same for all settings."""
    step, dtype = step_of(config), DTYPES[config.numerics.precision]
    finite, batch = FiniteCheck(CUDA), batch_of(config, dtype)
    normalised = config.model.method.name in ("simclr", "mocov2", "swav")  # by the loss, in float32
    kinds = (torch.float32,) if normalised else (dtype,)
    for at in range(steps):
        with gpu.watched():
            loss, embedding = step(batch, at=at)
            finite.note(at, loss)
        assert not gpu.copied and not gpu.on_the_host()
        assert (loss.device, loss.shape, loss.dtype) == (CUDA, (), torch.float32)
        assert embedding.shape == (IMAGES // config.optim.accumulate, step.method.dim)
        assert embedding.is_cuda and embedding.dtype in kinds and not embedding.requires_grad
    for name, tensor in step.method.state_dict().items():
        assert tensor.is_cuda, name
        assert tensor.dtype in (torch.float32, torch.int64), name
    assert all(parameter.grad is None for parameter in step.method.parameters())
    return step


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "bf16"),
        ({"channels_last": False}, "bf16"),
        ({"activation_memory": 0.5}, "bf16"),
        ({"accumulate": 2, "optimizer": "lars"}, "fp16"),
        ({"optimizer": "lars"}, "fp32"),
    ],
    ids=str,
)
def test_step_has_expected_devices_and_dtypes(
    settings: dict[str, Any], precision: str, gpu: Gpu
) -> None:
    step = take_steps(with_settings(CONFIG, precision=precision, **settings), gpu)
    assert step.scaler.is_enabled() == (precision == "fp16")
    types = {one.tensor.dtype for one in gpu.outputs if one.by == "convolution"}
    assert types == {DTYPES[precision]}


@pytest.mark.parametrize(
    "name",
    [
        "simclr, predictor, stop-gradient", "mocov2, parts", "byol", "swav, multi-crop",
        "swav, predictor, queue, no stop-gradient", "average, 2 steps, asymmetric 2x",
    ],
)  # fmt: skip
def test_method_steps_compute_similarities_in_float32(name: str, gpu: Gpu) -> None:
    """Momentum encoders, queues, averages, frozen prototypes, and BN over parts of a batch.

    Similarities are float32 products, whatever the precision of the layers.
    """
    config = ALL_CASES[name].applied(CONFIG, precision="bf16")
    take_steps(with_settings(config, precision="fp16", accumulate=2), gpu)
    method, images = config.model.method, IMAGES // 2
    shape = {
        "simclr": (2 * images, 2 * images),
        "mocov2": (images, getattr(method, "queue", 0)),
        "swav": (images, getattr(method, "prototypes", 0)),
    }.get(method.name)
    logits = [one.tensor for one in gpu.outputs if one.by == "mm" and one.tensor.shape == shape]
    assert {one.dtype for one in logits} == ({torch.float32} if shape else set())


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch built with CUDA")
@pytest.mark.parametrize(("channels_last", "stem"), [(True, "imagenet"), (False, "cifar")])
def test_activations_have_configured_memory_format(
    channels_last: bool, stem: str, gpu: Gpu
) -> None:
    """Check activations, weights and their gradients: cuDNN copies tensors of another layout."""
    model = with_model_settings(CONFIG.model, backbone="resnet18", stem=stem)
    config = replace(CONFIG, augment=AugmentConfig.alike(crop=64), model=model)
    config = with_settings(config, precision="bf16", channels_last=channels_last)
    take_steps(config, gpu, steps=1)
    counts = gpu.images_in(torch.channels_last if channels_last else torch.contiguous_format)
    assert counts["convolution", True] == 40  # 20 for each view
    assert counts["convolution_backward", True] > 40
    wrong = {by: count for (by, right), count in counts.items() if not right and by != "expand"}
    # The gradient of torch's pooling is always contiguous; loaders' views are always channels-last.
    assert wrong == ({"div": 2} if channels_last else {"split": 2})
    assert counts["clone", True] == (0 if channels_last else 2)


BLUNDERS: dict[str, Callable[[Output], Any]] = {
    "a value": lambda output: output.loss.item(),
    "copied out": lambda output: output.embedding.cpu(),
    "copied in": lambda output: torch.zeros(3).to(CUDA, non_blocking=True),
    "copied into": lambda output: torch.zeros(3, device=CUDA).copy_(torch.zeros(3)),
    "places": lambda output: output.embedding[output.embedding > 0],
    "the current stream": lambda output: torch.cuda.current_stream().synchronize(),
    "left on the host": lambda output: output.embedding + torch.zeros(16),
}


def test_fake_gpu_detects_waits_and_mixed_devices(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make every typical mistake after the optimizer's step, and check that it is detected."""
    from torch._subclasses import fake_tensor

    errors = (
        HostWait,
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        # torch 2.11 raises a plain RuntimeError for tensors on two devices.
        getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError),
    )
    step = step_of(CONFIG)
    for number, (name, blunder) in enumerate(BLUNDERS.items()):
        monkeypatch.setattr(
            step.method, "after_step", lambda outputs, at, make=blunder: make(outputs[-1])
        )
        with gpu.watched():
            try:
                step(batch_of(CONFIG, torch.float32), at=number)
            except errors:
                continue
        pytest.fail(f"not found: {name}")
