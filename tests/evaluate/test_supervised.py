"""Training linear classifiers: steps against manual computation, several heads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.config.evaluate import FinetuneConfig, LinearConfig
from fastsiam.evaluate.supervised import Heads, SupervisedTraining
from tests.train.runs import CPU as HERE


def linear_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 100 training and 41 validation features with labels, nearly separable."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (141,), generator=generator)
    features = torch.eye(4, 6)[labels] * 3 + torch.randn(141, 6, generator=generator)
    return features[:100], labels[:100], features[100:], labels[100:]


def trained(config: LinearConfig, rates: list[float]) -> Any:
    """Train one head per rate on a small problem, without shuffling."""
    config = replace(config, lrs=tuple(rates))
    training = SupervisedTraining(config, features=6, classes=4, steps_per_epoch=5, place=HERE)
    features, labels, _, _ = linear_problem()
    batches = list(zip(features.split(20), labels.split(20), strict=True))
    for step, batch in enumerate(batches * config.epochs):
        training.step(step, batch)
    return training


LARS = LinearConfig(optimizer="lars", lrs=(300,), batch=20, epochs=3, seed=5)
SGD = LinearConfig(optimizer="sgd", lrs=(30,), batch=20, epochs=3, weight_decay=0.01, seed=5)


def lars_by_hand(weight: Tensor, gradient: Tensor, buffer: Tensor, rate: float) -> None:
    """LARC without clipping, like the paper's code: scale 0.001 |w| / |g| unless one is 0."""
    norms = weight.norm(), gradient.norm()
    scale = 0.001 * norms[0] / norms[1] if min(norms) > 0 else 1.0
    buffer.mul_(0.9).add_(gradient * scale)
    weight.sub_(rate * buffer)


def sgd_by_hand(weight: Tensor, gradient: Tensor, buffer: Tensor, rate: float) -> None:
    buffer.mul_(0.9).add_(gradient + 0.01 * weight)
    weight.sub_(rate * buffer)


@pytest.mark.parametrize(("config", "update"), [(LARS, lars_by_hand), (SGD, sgd_by_hand)])
def test_each_head_matches_manual_recomputation(config: LinearConfig, update: Any) -> None:
    """Recompute training: base rate x 20 / 256, cosine per step, the softmax's gradient."""
    rates = [0.02, 0.1, *config.lrs]
    training = trained(config, rates)
    features, labels, _, _ = linear_problem()
    start = Heads(1, 6, 4, seed=5)
    steps = 3 * 5
    for head, base_rate in enumerate(rates):
        weight, bias = start.weight[0].detach().clone(), start.bias[0].detach().clone()
        buffers = torch.zeros_like(weight), torch.zeros_like(bias)
        for step in range(steps):
            rows = slice(20 * (step % 5), 20 * (step % 5) + 20)
            error = (features[rows] @ weight.T + bias).softmax(1) - F.one_hot(labels[rows], 4)
            rate = base_rate * 20 / 256 * 0.5 * (1 + math.cos(math.pi * step / steps))
            update(weight, error.T @ features[rows] / 20, buffers[0], rate)
            update(bias, error.mean(0), buffers[1], rate)
        for name, expected in (("weight", weight), ("bias", bias)):
            actual = getattr(training.network, name)[head].detach()
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert (weight - start.weight[0]).abs().max() > 1e-2


def test_each_head_is_validated_separately() -> None:
    training = trained(replace(SGD, epochs=30), [1e-6, 30.0])
    _, _, features, labels = linear_problem()
    results = training.evaluate([(features[:30], labels[:30]), (features[30:], labels[30:])])
    for number, result in enumerate(results):
        scores = training.network(features)[:, number]
        right = scores.argmax(1) == labels
        assert result.top1 == pytest.approx(100 * right.float().mean().item())
        assert result.images == 41 and result.top5 == 100  # there are four classes
        for kind, accuracy in enumerate(result.per_class):
            assert accuracy == pytest.approx(100 * right[labels == kind].float().mean().item())
    assert results[0].top1 < 60 < 85 < results[1].top1


def test_skipped_first_step_initialises_momentum() -> None:
    """A gradient scaler skips the first step because its first scale is usually too large."""
    training = SupervisedTraining(
        FinetuneConfig(batch=4, epochs=1, lr=1.0),
        torch.nn.Linear(6, 5),
        features=5,
        classes=3,
        steps_per_epoch=1,
        dtype=torch.float32,
        place=HERE,
    )
    before = [parameter.detach().clone() for parameter in training.network.parameters()]
    for parameter in training.network.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    training.optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    training.optimizer.step()
    assert all(map(torch.equal, before, training.network.parameters()))
    assert all(not s["momentum_buffer"].any() for s in training.optimizer.state.values())
