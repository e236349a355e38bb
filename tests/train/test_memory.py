"""The estimate of training memory, compared with the memory that training uses."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from fastsiam.config.recipes import RECIPES
from fastsiam.distributed import Place
from fastsiam.errors import TrainingError
from fastsiam.methods import build_method
from fastsiam.train.memory import check_memory, training_bytes
from tests.configs import with_settings
from tests.train.runs import CPU

HOST, GPU = MemoryError(), torch.OutOfMemoryError()
DALI = RuntimeError("[/opt/dali/malloc.cc:3] Can't allocate 4096 bytes on device 0.")


def test_estimate_bounds_saved_tensors() -> None:
    """The method's entire forward pass, including heads and loss, on real tensors."""
    config = with_settings(RECIPES["cifar10"](), batch=32, precision="fp32", width=16)
    method = build_method(config.model)
    saved_tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        method((torch.zeros(32, 3, 32, 32), torch.zeros(32, 3, 32, 32)), torch.zeros(32).long())
    really = sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())
    really += 2 * sum(weight.nbytes for weight in method.parameters())
    assert really < training_bytes(config, CPU, images=100) < 2 * really


def test_estimate_includes_method_state() -> None:
    """A frozen encoder adds its weights once. Averages add one row per image."""
    config = with_settings(RECIPES["cifar10"](), batch=32, width=16)
    images = 1_000_000
    plain = training_bytes(config, CPU, images=images)
    method = build_method(config.model)
    encoder = [*method.backbone.parameters(), *method.get_submodule("projector").parameters()]
    frozen = training_bytes(with_settings(config, alternate_every=10), CPU, images=images) - plain
    assert 1 < frozen / sum(weight.nbytes for weight in encoder) < 1.01  # plus BN statistics
    averaging = with_settings(config, target_average=0.8)
    assert training_bytes(averaging, CPU, images=images) - plain == images * method.dim * 4


def test_estimate_scales_with_settings() -> None:
    def estimate(place: Place = CPU, **settings: object) -> float:
        config = with_settings(
            RECIPES["imagenet"](), **{"batch": 64, "precision": "fp32", **settings}
        )
        return training_bytes(config, place, images=100)

    base = estimate()
    assert estimate(precision="bf16") < 0.6 * base
    assert estimate(crop=112) < 0.4 * base
    assert estimate(accumulate=4) < 0.4 * base
    assert estimate(backbone="resnet18") < 0.4 * base
    assert estimate(Place(0, 2, CPU.device)) < 0.6 * base
    # 1.5 times the 88 MB per view that a ResNet-50 keeps in float32, plus views and heads.
    assert 1.5 * 0.17e9 < base / 64 < 1.5 * 0.19e9


@pytest.mark.parametrize(
    ("settings", "error", "advice"),
    [
        ({"pipeline": "dali"}, HOST, "--activation-memory 0.5 or fewer"),  # on a CPU it keeps two
        (
            {"pipeline": "dali", "activation_memory": 0.5},
            GPU,
            "--prefetch 1 or fewer --workers or --pipeline native;",
        ),
        (
            {"pipeline": "dali"},
            DALI,
            "--activation-memory 0.5 or --prefetch 1 or fewer --workers or --pipeline native;",
        ),
        ({"pipeline": "memory"}, GPU, "--activation-memory 0.5 or --pipeline native; a new run"),
        ({"pipeline": "memory"}, HOST, "--activation-memory 0.5 or --pipeline native or fewer"),
        ({"prefetch": 3}, GPU, "--activation-memory 0.5; a new run"),  # prefetches on the host
        ({}, HOST, "--activation-memory 0.5 or fewer --workers"),
        ({"prefetch": 3}, HOST, "--activation-memory 0.5 or --prefetch 1 or fewer --workers"),
        (
            {"prefetch": 3, "pipeline": "torchvision"},
            HOST,
            "--activation-memory 0.5 or fewer --workers",
        ),
        ({"backbone": "convnext_tiny"}, HOST, "fewer --workers"),
        ({"backbone": "convnext_tiny", "compile": "on"}, HOST, "--activation-memory 0.5 or fewer"),
    ],
)
def test_oom_advice_depends_on_settings(
    settings: dict[str, object], error: Exception, advice: str
) -> None:
    config = with_settings(
        RECIPES["imagenet"](), **{"pipeline": "native", "compile": "off", **settings}
    )
    with pytest.raises(TrainingError) as caught:
        check_memory(error, config, at=1, saved="nothing was saved yet")
    message = str(caught.value)
    assert f"to resume this run, pass {advice}" in message
    assert message.startswith("out of GPU memory") == (error is not HOST)


def test_oom_error_without_advice_for_resuming() -> None:
    config = with_settings(RECIPES["imagenet"](), pipeline="native", activation_memory=0.5)
    advice = "with --batch 512; a new run needs less with a lower --batch"
    with pytest.raises(TrainingError, match=advice):
        check_memory(GPU, config, at=1, saved="nothing was saved yet")
