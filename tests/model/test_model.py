"""Heads, loss and initialisation as in the paper and its authors' code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsiam.config import ModelConfig
from fastsiam.methods import build_method, method_skeleton
from fastsiam.model.losses import negative_cosine
from tests.configs import make_model_config


def skeleton_of(**settings: Any) -> Any:
    return method_skeleton(make_model_config(**settings))


def test_initial_weights_have_expected_scale() -> None:
    """Convolutions: He normal, fan-out. Heads: PyTorch's default, U(-1/sqrt(in), 1/sqrt(in))."""
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


def test_heads_have_layers_of_paper() -> None:
    heads = skeleton_of(backbone="resnet18")
    head = heads.projector
    kinds = [type(m).__name__ for m in head]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert [m.bias is None for m in head if isinstance(m, nn.Linear)] == [True] * 3
    assert [m.affine for m in head if isinstance(m, nn.BatchNorm1d)] == [True, True, False]
    assert [m.out_features for m in head if isinstance(m, nn.Linear)] == [2048] * 3
    short = skeleton_of(projector_layers=2, dim=64).projector
    assert [type(m).__name__ for m in short] == kinds[:3] + kinds[-2:]
    wide = skeleton_of(projector_dim=24, dim=8).projector
    assert [m.out_features for m in wide if isinstance(m, nn.Linear)] == [24, 24, 8]
    head = heads.predictor
    assert [type(m).__name__ for m in head] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    linear = [m for m in head if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == [(512, 2048), (2048, 512)]
    assert [m.bias is not None for m in linear] == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_float32_and_finite_for_large_half_inputs(dtype: torch.dtype) -> None:
    """Squares of 1e4 overflow fp16, so under autocast the loss must be computed in float32."""
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
