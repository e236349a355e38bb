"""Backbones, heads, loss and method: as the paper and its authors' code fix them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.backbones import build_backbone
from fastsiam.config import ModelConfig
from fastsiam.heads import predictor, projector
from fastsiam.losses import negative_cosine
from fastsiam.methods import SimSiam, build_method

TINY = ModelConfig(
    backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_backbone_is_torchvisions(name: str) -> None:
    """Same parameters under the same names, same function."""
    ours = build_backbone(ModelConfig(backbone=name)).eval()  # type: ignore[arg-type]
    theirs = getattr(torchvision.models, name)().eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing and unexpected == ["fc.weight", "fc.bias"]
    theirs.fc = nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    assert ours.features == theirs(x).shape[1]


def test_cifar_stem_keeps_the_resolution() -> None:
    backbone = build_backbone(ModelConfig(backbone="resnet18", stem="cifar"))
    assert (backbone.conv1.kernel_size, backbone.conv1.stride, backbone.conv1.padding) == (
        (3, 3),
        (1, 1),
        (1, 1),
    )
    assert backbone.maxpool(backbone.conv1(torch.zeros(1, 3, 32, 32))).shape == (1, 64, 32, 32)
    assert sum(p.numel() for p in backbone.parameters()) == 11_168_832
    assert build_backbone(ModelConfig(backbone="resnet10", width=16)).features == 128


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("zero", [True, False])
def test_residual_blocks_start_as_the_identity(name: str, zero: bool) -> None:
    backbone = build_backbone(ModelConfig(backbone=name, zero_init_residual=zero))  # type: ignore[arg-type]
    last = [m.bn3 for m in backbone.modules() if isinstance(m, Bottleneck)]
    last += [m.bn2 for m in backbone.modules() if isinstance(m, BasicBlock)]
    assert len(last) in (8, 16)
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert bool((norm.weight == 0).all()) == (zero and norm in last)


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


# --- loss


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


# --- method


def gradients(method: SimSiam, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(method.parameters()), allow_unused=True))


def test_stop_gradient_treats_the_other_view_as_a_constant() -> None:
    """Gradients equal those of the loss with z put in as numbers, and differ without the stop."""
    torch.manual_seed(0)
    method = build_method(TINY)
    view1, view2 = torch.randn(2, 8, 3, 16, 16)
    stopped = gradients(method, method(view1, view2)[0])
    z1, z2 = (method.projector(method.backbone(view)) for view in (view1, view2))
    numbers1, numbers2 = torch.tensor(z1.tolist()), torch.tensor(z2.tolist())
    p1, p2 = method.predictor(z1), method.predictor(z2)
    by_hand = (negative_cosine(p1, numbers2) + negative_cosine(p2, numbers1)) / 2
    for got, expected in zip(stopped, gradients(method, by_hand), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-5)
    method.stop_gradient = False
    free = gradients(method, method(view1, view2)[0])
    assert max((a - b).abs().max().item() for a, b in zip(stopped, free, strict=True)) > 1e-4


def test_loss_is_symmetrised_half_and_half() -> None:
    torch.manual_seed(0)
    method = build_method(TINY)
    view1, view2 = torch.randn(2, 8, 3, 16, 16)
    loss, z = method(view1, view2)
    swapped, _ = method(view2, view1)
    torch.testing.assert_close(loss, swapped)
    z1, z2 = (method.projector(method.backbone(view)) for view in (view1, view2))
    parts = negative_cosine(method.predictor(z1), z2), negative_cosine(method.predictor(z2), z1)
    torch.testing.assert_close(loss, (parts[0] + parts[1]) / 2)
    assert not z.requires_grad and torch.equal(z, z1.detach())


def test_each_view_has_its_own_bn_statistics() -> None:
    """The encoder runs twice, so running statistics move twice a step, by each view's own mean."""
    method = build_method(TINY).train()
    norm = method.backbone.bn1
    view1, view2 = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16) + 3
    means = [method.backbone.conv1(view).mean((0, 2, 3)) for view in (view1, view2)]
    method(view1, view2)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, 0.9 * 0.1 * means[0] + 0.1 * means[1])
    assert all(
        m.num_batches_tracked == 2 for m in method.modules() if isinstance(m, nn.BatchNorm1d)
    )


def test_channels_last_survives_the_backbone() -> None:
    backbone = build_backbone(TINY).to(memory_format=torch.channels_last)
    seen = []
    for module in backbone.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            module.register_forward_hook(
                lambda module, inputs, out: seen.append(
                    out.is_contiguous(memory_format=torch.channels_last)
                )
            )
    backbone(torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))
    assert len(seen) > 10 and all(seen)
