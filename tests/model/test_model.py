"""Heads, loss and method: as the paper and its authors' code fix them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastsiam.config import ModelConfig
from fastsiam.methods import Method, Output, SimSiam, build_method
from fastsiam.model.backbones import (
    ResNet,
)
from fastsiam.model.heads import predictor, projector
from fastsiam.model.losses import negative_cosine
from tests.configs import model_of

TINY = model_of(
    backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
)


def test_initialisers() -> None:
    """Convolutions: He's normal, fan-out. Heads: PyTorch's default, U(-1/sqrt(in), 1/sqrt(in))."""
    torch.manual_seed(0)
    method = build_method(ModelConfig(backbone="resnet18"))
    for module in method.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert module.weight.abs().max() <= bound
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_projector_is_the_papers() -> None:
    head = projector(512, 2048, layers=3)
    kinds = [type(m).__name__ for m in head]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert [m.bias is None for m in head if isinstance(m, nn.Linear)] == [True] * 3
    assert [m.affine for m in head if isinstance(m, nn.BatchNorm1d)] == [True, True, False]
    assert head(torch.randn(4, 512)).shape == (4, 2048)
    assert [type(m).__name__ for m in projector(512, 64, layers=2)] == kinds[:3] + kinds[-2:]


def test_predictor_is_the_papers() -> None:
    head = predictor(2048, 512)
    assert [type(m).__name__ for m in head] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert [tuple(m.weight.shape) for m in head if isinstance(m, nn.Linear)] == [
        (512, 2048),
        (2048, 512),
    ]
    assert [m.bias is not None for m in head if isinstance(m, nn.Linear)] == [False, True]


def test_loss_equals_float64_numpy() -> None:
    p, z = torch.randn(64, 32), torch.randn(64, 32)
    a, b = p.double().numpy(), z.double().numpy()
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert negative_cosine(p, z).item() == pytest.approx(-cosine.mean(), abs=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_loss_is_bounded_and_blind_to_scale(scale: float) -> None:
    p, z = torch.randn(64, 32), torch.randn(64, 32)
    loss = negative_cosine(p, z)
    assert -1 <= loss <= 1
    torch.testing.assert_close(negative_cosine(p, z * scale), loss)
    torch.testing.assert_close(negative_cosine(p * scale, z), loss)
    assert negative_cosine(z, z * scale).item() == pytest.approx(-1, abs=1e-6)
    assert negative_cosine(z, -z).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_float32_and_finite_for_large_half_inputs(dtype: torch.dtype) -> None:
    """Squares of 1e4 overflow fp16; under autocast the loss must not be computed in it."""
    p, z = (
        (torch.randn(16, 512) * 1e4).to(dtype).requires_grad_(),
        (torch.randn(16, 512) * 1e4).to(dtype),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = negative_cosine(p, z)
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert p.grad is not None and torch.isfinite(p.grad).all()
    assert negative_cosine(torch.zeros(2, 4), torch.zeros(2, 4)) == 0


def simsiam(config: ModelConfig) -> SimSiam:
    method = build_method(config)
    assert isinstance(method, SimSiam)
    return method


def taken(method: Method, *views: Tensor) -> Output:
    output: Output = method(views, torch.arange(len(views[0])))
    return output


def gradients(method: SimSiam, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(method.parameters()), allow_unused=True))


def test_stop_gradient_treats_the_other_view_as_a_constant() -> None:
    """Gradients equal those of the loss with z put in as numbers, and differ without the stop."""
    torch.manual_seed(0)
    method = simsiam(TINY)
    view1, view2 = torch.randn(2, 8, 3, 16, 16)
    stopped = gradients(method, taken(method, view1, view2).loss)
    z1, z2 = (method.projector(method.backbone(view)) for view in (view1, view2))
    numbers1, numbers2 = torch.tensor(z1.tolist()), torch.tensor(z2.tolist())
    p1, p2 = method.predictor(z1), method.predictor(z2)
    by_hand = (negative_cosine(p1, numbers2) + negative_cosine(p2, numbers1)) / 2
    for got, expected in zip(stopped, gradients(method, by_hand), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-5)
    free_config = replace(method.config, stop_gradient=False)
    other = simsiam(replace(TINY, method=free_config))
    other.load_state_dict(method.state_dict())
    free = gradients(other, taken(other, view1, view2).loss)
    assert max((a - b).abs().max().item() for a, b in zip(stopped, free, strict=True)) > 1e-4


def test_loss_is_symmetrised_half_and_half() -> None:
    torch.manual_seed(0)
    method = simsiam(TINY)
    view1, view2 = torch.randn(2, 8, 3, 16, 16)
    loss, z, _ = taken(method, view1, view2)
    swapped, *_ = taken(method, view2, view1)
    torch.testing.assert_close(loss, swapped)
    z1, z2 = (method.projector(method.backbone(view)) for view in (view1, view2))
    parts = negative_cosine(method.predictor(z1), z2), negative_cosine(method.predictor(z2), z1)
    torch.testing.assert_close(loss, (parts[0] + parts[1]) / 2)
    assert not z.requires_grad and torch.equal(z, z1.detach())


def test_each_view_has_its_own_bn_statistics() -> None:
    """The encoder runs twice, so running statistics move twice a step, by each view's own mean."""
    method = build_method(TINY).train()
    assert isinstance(method.backbone, ResNet)
    norm = method.backbone.bn1
    view1, view2 = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16) + 3
    means = [method.backbone.conv1(view).mean((0, 2, 3)) for view in (view1, view2)]
    taken(method, view1, view2)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, 0.9 * 0.1 * means[0] + 0.1 * means[1])
    assert all(
        m.num_batches_tracked == 2 for m in method.modules() if isinstance(m, nn.BatchNorm1d)
    )


def test_a_projector_may_be_wider_within() -> None:
    method = simsiam(model_of(backbone="resnet10", dim=8, projector_dim=24))
    widths = [m.out_features for m in method.projector if isinstance(m, nn.Linear)]
    assert widths == [24, 24, 8]
