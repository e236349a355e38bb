"""Learning rates over batch, ranks, accumulation and time; weight decay on everything."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
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
    set_rates,
)
from fastsiam.pipelines.order import Order
from tests.configs import model_of


def groups(**settings: Any) -> list[ParamGroup]:
    """Return the parameter groups of a small SimSiam."""
    small = {"backbone": "resnet10", "width": 4, "dim": 8, "predictor_dim": 2}
    return build_method(model_of(**small, **settings)).param_groups()


GROUPS = groups()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(64, 0.0125), (128, 0.025), (256, 0.05), (512, 0.1), (1024, 0.2), (4096, 0.8)],
)
@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (8, 1), (2, 4), (32, 2)])
def test_rate_scales_with_the_global_batch_alone(
    batch: int, expected: float, world: int, accumulate: int
) -> None:
    """A rank's share is batch / world; neither it nor its parts change the rate."""
    config = OptimConfig(batch=batch, accumulate=accumulate)
    order = Order(images=10_000, batch=config.batch, seed=0, world=world)
    assert len(order.indices(0, 0)) * world == batch
    assert peak_lr(config) == pytest.approx(expected)
    assert rates_at(config, GROUPS, 0, order.steps)["encoder"] == pytest.approx(expected)


def test_cosine_per_step() -> None:
    config = OptimConfig(epochs=10, batch=256)
    rates = [rates_at(config, GROUPS, step, 20)["encoder"] for step in range(200)]
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(0.05 * (1 + math.cos(math.pi * step / 200)) / 2)
    assert rates[0] == 0.05 and rates[100] == pytest.approx(0.025) and 0 < rates[-1] < 1e-5
    assert all(a > b for a, b in pairwise(rates))


def test_a_cosine_between_two_rates() -> None:
    """SwAV's: from 0.3 over 10 of 100 epochs to 4.8, and from there to 0.0048."""
    config = OptimConfig(
        batch=4096, lr=0.3, warmup_epochs=10, warmup_from=0.0625, lr_end=0.001, epochs=100
    )
    rates = [decaying_rate(config, step, 10) for step in range(1000)]
    assert rates[0] == pytest.approx(0.3 + 4.5 / 100) and rates[99] == pytest.approx(4.8)
    assert rates[100] == pytest.approx(4.8) and rates[550] == pytest.approx((4.8 + 0.0048) / 2)
    assert 0.0048 < rates[-1] < 0.00485
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:])[::-1]


def test_predictor_rate_neither_decays_nor_warms_up() -> None:
    config = OptimConfig(epochs=10, batch=512, warmup_epochs=2)
    table = [rates_at(config, GROUPS, step, 5) for step in range(50)]
    assert {rates["predictor"] for rates in table} == {0.1}
    assert [rates["encoder"] for rates in table[:10]] == pytest.approx(
        [0.01 * (i + 1) for i in range(10)]
    )
    assert table[10]["encoder"] == 0.1 and table[49]["encoder"] < 0.001
    decaying = groups(predictor_lr="cosine")
    for step in range(50):
        rates = rates_at(config, decaying, step, 5)
        assert rates["predictor"] == rates["encoder"]


def test_weight_decay_is_on_every_parameter() -> None:
    method = build_method(model_of(backbone="resnet10", width=4, dim=8, predictor_dim=2))
    optimizer = build_optimizer(OptimConfig(), method.param_groups())
    assert isinstance(optimizer, torch.optim.SGD)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in method.parameters()}
    assert len(grouped) == len(list(method.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-4, 1e-4]
    assert all(p.requires_grad for p in method.parameters())


def test_a_step_is_sgd_with_momentum_and_decay_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    config = OptimConfig(batch=256, lr=0.5, momentum=0.9, weight_decay=0.1)
    optimizer = build_optimizer(config, [ParamGroup(name="encoder", params=[weight])])
    expected, velocity = 2.0, 0.0
    for rate in (0.5, 0.25, 0.125):
        set_rates(optimizer, {"encoder": rate})
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        velocity = 0.9 * velocity + 1.0 + 0.1 * expected
        expected -= rate * velocity
        assert weight.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "accumulate", "world", "part", "peak", "first", "at_warm", "middle"),
    [
        # peak = lr x batch / 256; the warm-up's first step is peak / (steps of 10 epochs)
        (256, 1, 1, 256, 0.3, 0.3 / 50_040, 0.3, 0.15),
        (1024, 4, 8, 32, 1.2, 1.2 / 12_510, 1.2, 0.6),
        (4096, 1, 8, 512, 4.8, 4.8 / 3_120, 4.8, 2.4),
        (4096, 8, 8, 64, 4.8, 4.8 / 3_120, 4.8, 2.4),
    ],
)
def test_large_batches_on_imagenet(
    batch: int, accumulate: int, world: int, part: int,
    peak: float, first: float, at_warm: float, middle: float,
) -> None:  # fmt: skip
    """LARS for 100 epochs with 10 of warm-up, as SimCLR: rates worked out by hand."""
    config = OptimConfig(
        batch=batch, accumulate=accumulate, optimizer="lars", lr=0.3, warmup_epochs=10, epochs=100
    )
    order = Order(images=1_281_167, batch=batch, seed=0, world=world)
    steps = {256: 5_004, 1024: 1_251, 4096: 312}[batch]
    assert order.steps == steps and len(order.indices(0, 0)) // accumulate == part
    assert peak_lr(config) == pytest.approx(peak)
    assert rates_at(config, GROUPS, 0, steps) == pytest.approx(
        {"encoder": first, "predictor": peak}
    )
    assert rates_at(config, GROUPS, 10 * steps, steps)["encoder"] == pytest.approx(at_warm)
    assert rates_at(config, GROUPS, 55 * steps, steps)["encoder"] == pytest.approx(middle)


def lars(*weights: torch.Tensor, **settings: float | bool) -> tuple[Lars, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    settings = {"lr": 1.0, "momentum": 0.0, "trust": 0.1} | settings
    return Lars([{"params": parameters}], **settings), parameters  # type: ignore[arg-type]


def test_lars_by_hand() -> None:
    """|w| = 5, |g| = 10, wd .5: g + wd w times .1 x 5 / (10 + .5 x 5) = .04."""
    optimizer, (weight,) = lars(torch.tensor([[3.0, 4.0]]), weight_decay=0.5)
    weight.grad = torch.tensor([[6.0, 8.0]])
    optimizer.step()
    expected = torch.tensor([[3.0 - 0.04 * 7.5, 4.0 - 0.04 * 10.0]])
    torch.testing.assert_close(weight.detach(), expected)


def test_lars_moves_by_its_momentum() -> None:
    """The moves add up as velocity = .9 velocity + move; the rate is applied at the end."""
    optimizer, (weight,) = lars(torch.tensor([[2.0]]), momentum=0.9, lr=0.5)
    value, velocity = 2.0, 0.0
    for rate, gradient in ((0.5, 1.0), (0.25, -3.0), (0.125, 2.0)):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        velocity = 0.9 * velocity + gradient * 0.1 * abs(value) / abs(gradient)
        value -= rate * velocity
        assert weight.item() == pytest.approx(value, rel=1e-6)


def test_lars_without_a_norm_is_sgd() -> None:
    """Zero weights move by their gradient, a zero gradient leaves the decay, unscaled."""
    optimizer, (zero, still) = lars(torch.zeros(1, 2), torch.tensor([[2.0, 0.0]]), weight_decay=0.1)
    zero.grad, still.grad = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.tensor([[-1.0, 2.0]]))
    torch.testing.assert_close(still.detach(), torch.tensor([[1.8, 0.0]]))


def test_lars_leaves_bn_and_biases_to_plain_momentum() -> None:
    for everything, expected in ((False, [0.0, 3.0]), (True, [])):
        optimizer, (bias, unused) = lars(
            torch.tensor([2.0, 4.0]), torch.ones(2), weight_decay=0.5, adapt_all=everything
        )
        bias.grad = torch.tensor([2.0, 1.0])
        norm, gradient = math.hypot(2, 4), math.hypot(2, 1)
        scale = 0.1 * norm / (gradient + 0.5 * norm)
        if everything:
            expected = [2 - scale * (2 + 0.5 * 2), 4 - scale * (1 + 0.5 * 4)]
        optimizer.step()
        torch.testing.assert_close(bias.detach(), torch.tensor(expected))
        assert torch.equal(unused.detach(), torch.ones(2))  # has no gradient


def test_lars_under_a_gradient_scaler() -> None:
    """As torch's GradScaler hands them over: scaled gradients, and whether any overflowed."""
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


def test_lars_is_built_from_the_settings_and_its_state_is_saved() -> None:
    method = build_method(model_of(backbone="resnet10", width=4, dim=8, predictor_dim=2))
    config = OptimConfig(optimizer="lars", lars_trust=0.002, weight_decay=1e-6)
    optimizer = build_optimizer(config, method.param_groups())
    assert isinstance(optimizer, Lars)
    assert all(g["trust"] == 0.002 and g["weight_decay"] == 1e-6 for g in optimizer.param_groups)
    assert not any(g["adapt_all"] for g in optimizer.param_groups)
    of_all = build_optimizer(replace(config, lars_all=True), method.param_groups())
    assert all(g["adapt_all"] for g in of_all.param_groups)
    for parameter in method.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other = build_optimizer(config, method.param_groups())
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == len(list(method.parameters()))


def rate(config: OptimConfig, step: int) -> float:
    """Return the encoder's rate, with 10 steps an epoch."""
    return rates_at(config, GROUPS, step, 10)["encoder"]
