"""Learning rates for any batch, ranks, accumulation and step; weight decay on all parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastsiam.config import OptimConfig
from fastsiam.methods import ParamGroup, build_method
from fastsiam.methods.optim import (
    Lars,
    build_optimizer,
    decaying_rate,
    peak_lr,
    rates_at,
)
from tests.configs import make_model_config


def groups(**settings: Any) -> list[ParamGroup]:
    small = {"backbone": "resnet10", "width": 4, "dim": 8, "predictor_dim": 2}
    return build_method(make_model_config(**small, **settings)).param_groups()


GROUPS, COSINE_GROUPS = groups(), groups(predictor_lr="cosine")


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 10},
        {"epochs": 10, "batch": 512, "warmup_epochs": 2},
        # SwAV's schedule: from 0.3 to 4.8 over 10 of 100 epochs, then down to 0.0048.
        {"epochs": 100, "batch": 4096, "lr": 0.3, "warmup_epochs": 10, "warmup_from": 0.0625,
         "lr_end": 0.001},
    ],
)  # fmt: skip
def test_learning_rates_follow_schedule(settings: dict[str, Any]) -> None:
    """Linear warmup, then a cosine. The predictor's rate is constant, or follows the others."""
    config, steps = OptimConfig(**settings), 5
    peak, warmup, total = peak_lr(config), config.warmup_epochs * steps, config.epochs * steps
    start, end, decaying = config.warmup_from * peak, config.lr_end * peak, []
    for step in range(total):
        rates = rates_at(config, GROUPS, step, steps)
        share = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        expected = end + share * (peak - end)
        if step < warmup:
            expected = start + (peak - start) * (step + 1) / warmup
        assert rates == pytest.approx({"encoder": expected, "predictor": peak})
        both = rates_at(config, COSINE_GROUPS, step, steps)
        assert both["predictor"] == both["encoder"] == decaying_rate(config, step, steps)
        decaying.append(rates["encoder"])
    assert max(decaying) == peak and end <= decaying[-1] < end + 0.01 * peak


def test_groups_of_same_name_are_rejected() -> None:
    """They would get the same rate."""
    groups = [
        ParamGroup(name="heads", params=[torch.nn.Parameter(torch.ones(1))]) for _ in range(2)
    ]
    with pytest.raises(ValueError, match="two parameter groups have the same name"):
        build_optimizer(OptimConfig(), groups)


def test_sgd_step_equals_manual_computation() -> None:
    weight, other = (torch.nn.Parameter(torch.tensor([2.0])) for _ in range(2))
    config = OptimConfig(batch=256, lr=0.5, momentum=0.9, weight_decay=0.1)
    head_group = ParamGroup(name="head", params=[other], weight_decay=0.0)
    optimizer = build_optimizer(config, [ParamGroup(name="encoder", params=[weight]), head_group])
    expected, velocity = 2.0, 0.0
    for rate in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, 1.0
        weight.grad, other.grad = torch.tensor([1.0]), torch.tensor([1.0])
        optimizer.step()
        velocity = 0.9 * velocity + 1.0 + 0.1 * expected
        expected -= rate * velocity
        assert weight.item() == pytest.approx(expected, rel=1e-6)
    assert other.item() == pytest.approx(2 - 1 - 1.9 - 2.71, rel=1e-6)


def lars(*weights: torch.Tensor, **settings: float | bool) -> tuple[Lars, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    settings = {"lr": 1.0, "momentum": 0.0, "trust": 0.1} | settings
    return Lars([{"params": parameters}], **settings), parameters  # type: ignore[arg-type]


@pytest.mark.parametrize("adapt_all", [False, True])
def test_lars_equals_its_formula(adapt_all: bool) -> None:
    """Three float64 steps: momentum, decay, zero norms, 1-d weights and a missing gradient."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(2, 3, generator=generator), torch.zeros(1, 2)]
    starts += [torch.tensor([[2.0, 0.0]]), torch.randn(4, generator=generator), torch.ones(2)]
    optimizer, weights = lars(*starts, momentum=0.9, weight_decay=0.5, adapt_all=adapt_all)
    values = [weight.detach().double().clone() for weight in weights]
    velocities = [torch.zeros_like(value) for value in values]
    for rate in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = rate
        for number, (weight, value) in enumerate(zip(weights[:-1], values, strict=False)):
            weight.grad = torch.randn(weight.shape, generator=generator) * (number != 2)
            move = weight.grad.double()
            if value.dim() > 1 or adapt_all:
                norm, slope = value.norm(), move.norm()
                scale = 0.1 * norm / (slope + 0.5 * norm) if norm and slope else 1.0
                move = scale * (move + 0.5 * value)
            velocities[number] = 0.9 * velocities[number] + move
            value -= rate * velocities[number]
        optimizer.step()
        for weight, value in zip(weights, values, strict=True):
            torch.testing.assert_close(weight.detach().double(), value, atol=1e-5, rtol=1e-5)
    assert torch.equal(weights[-1].detach(), torch.ones(2))  # has no gradient
    alone, (bias,) = lars(torch.ones(2), weight_decay=0.5)
    bias.grad = torch.ones(2)
    alone.step()
    assert torch.equal(bias.detach(), torch.zeros(2))
    alone, (single,) = lars(torch.ones(1, 1))
    single.grad = torch.full((1, 1), 4e-43)
    alone.step()
    assert single.item() == 1


def test_lars_unscales_gradients_and_skips_overflow() -> None:
    """GradScaler passes scaled gradients and whether any of them overflowed."""
    results = []
    for scale in (None, 1024.0):
        optimizer, weights = lars(torch.tensor([[3.0, 4.0]]), torch.ones(2), weight_decay=0.5)
        for weight in weights:
            weight.grad = torch.full_like(weight, 2.0) * (scale or 1)
        if scale:
            optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        optimizer.step()
        results.append([weight.detach().clone() for weight in weights])
    torch.testing.assert_close(*results)
    before = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    weights[0].grad = torch.tensor([[math.inf, math.nan]])
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, weights, results[1]))
    after = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, before, after))


def test_optimizer_uses_settings_and_loads_state() -> None:
    """All parameters have weight decay, including BN parameters and biases."""
    method = build_method(make_model_config(backbone="resnet10", width=4, dim=8, predictor_dim=2))
    adapted = {"optimizer": "lars", "weight_decay": 1e-6, "lars_trust": 0.002}
    for kind, settings, expected in (
        (torch.optim.SGD, {"momentum": 0.8}, {"momentum": 0.8, "weight_decay": 1e-4}),
        (Lars, adapted, {"weight_decay": 1e-6, "trust": 0.002, "adapt_all": False}),
        (Lars, {"optimizer": "lars", "lars_all": True}, {"trust": 0.001, "adapt_all": True}),
    ):
        config = OptimConfig(**settings)
        optimizer = build_optimizer(config, method.param_groups())
        assert isinstance(optimizer, kind)
        assert all(group | expected == group for group in optimizer.param_groups)
        grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in method.parameters() if p.requires_grad)
        assert all(p.requires_grad for p in method.parameters())
        for parameter in method.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        other = build_optimizer(config, method.param_groups())
        other.load_state_dict(optimizer.state_dict())
        assert len(other.state) == len(grouped)
