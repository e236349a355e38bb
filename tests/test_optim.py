"""Learning rates over batch, ranks, accumulation and time; weight decay on everything."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fastsiam.config import ModelConfig, OptimConfig
from fastsiam.methods import build_method
from fastsiam.optim import build_optimizer, lr_at, peak_lr, set_lr
from fastsiam.pipelines.order import Order


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
    assert lr_at(config, 0, order.steps)["encoder"] == pytest.approx(expected)


def test_cosine_per_step() -> None:
    config = OptimConfig(epochs=10, batch=256)
    rates = [lr_at(config, step, 20)["encoder"] for step in range(200)]
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(0.05 * (1 + math.cos(math.pi * step / 200)) / 2)
    assert rates[0] == 0.05 and rates[100] == pytest.approx(0.025) and 0 < rates[-1] < 1e-5
    assert all(a > b for a, b in pairwise(rates))


def test_predictor_rate_neither_decays_nor_warms_up() -> None:
    config = OptimConfig(epochs=10, batch=512, warmup_epochs=2)
    table = [lr_at(config, step, 5) for step in range(50)]
    assert {rates["predictor"] for rates in table} == {0.1}
    assert [rates["encoder"] for rates in table[:10]] == pytest.approx(
        [0.01 * (i + 1) for i in range(10)]
    )
    assert table[10]["encoder"] == 0.1 and table[49]["encoder"] < 0.001
    decaying = replace(config, predictor_lr="cosine")
    assert all(r["predictor"] == r["encoder"] for r in (lr_at(decaying, s, 5) for s in range(50)))


def test_weight_decay_is_on_every_parameter() -> None:
    method = build_method(ModelConfig(backbone="resnet10", width=4, dim=8, predictor_dim=2))
    optimizer = build_optimizer(OptimConfig(), method.param_groups())
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in method.parameters()}
    assert len(grouped) == len(list(method.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-4, 1e-4]
    assert all(p.requires_grad for p in method.parameters())


def test_a_step_is_sgd_with_momentum_and_decay_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    config = OptimConfig(batch=256, lr=0.5, momentum=0.9, weight_decay=0.1)
    optimizer = build_optimizer(config, [{"params": [weight], "name": "encoder"}])
    expected, velocity = 2.0, 0.0
    for rate in (0.5, 0.25, 0.125):
        set_lr(optimizer, {"encoder": rate})
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        velocity = 0.9 * velocity + 1.0 + 0.1 * expected
        expected -= rate * velocity
        assert weight.item() == pytest.approx(expected, rel=1e-6)
