"""Losses, gradients, queues and momentum encoders are those of lightly's parts on the same tensors.

Both have the same weights: ours are copied, in their order, which is that of lightly's heads.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fastsiam.config import METHOD_CONFIGS, AugmentConfig, ModelConfig, OptimConfig, TrainConfig
from fastsiam.methods import BYOL, Method, MoCoV2, Moment, SwAV, build_method
from fastsiam.methods.momentum import update_average

pytest.importorskip("lightly", reason="needs lightly: pip install lightly")

IMAGES = 8
HEADS: dict[str, dict[str, Any]] = {
    "simsiam": {"projector_layers": 2, "dim": 16, "predictor_dim": 8},
    "fastsiam": {"projector_layers": 3, "dim": 16, "predictor_dim": 8},
    "simclr": {"projector_dim": 24, "dim": 16, "temperature": 0.3},
    "mocov2": {"projector_dim": 24, "dim": 16, "queue": 40, "encoder_momentum": 0.9},
    "byol": {"projector_dim": 24, "dim": 16, "predictor_dim": 12},
    "swav": {"projector_dim": 24, "dim": 16, "prototypes": 30, "frozen_epochs": 0.0},
}
VIEWS = {"fastsiam": 4, "swav": 3}


def config_of(name: str, **changes: Any) -> TrainConfig:
    method = METHOD_CONFIGS[name](**HEADS[name] | changes)
    return TrainConfig(
        augment=AugmentConfig.alike(VIEWS.get(name, 2), crop=16),
        model=ModelConfig(backbone="resnet10", stem="cifar", width=4, method=method),
        optim=OptimConfig(epochs=1, batch=IMAGES),
    )


def both(name: str, **changes: Any) -> tuple[Method, Any]:
    """Return our method and lightly's parts, with the same weights."""
    from fastsiam.bench.lightly import composed

    config = config_of(name, **changes)
    torch.manual_seed(0)
    ours = build_method(config.model, images=IMAGES).train()
    for module in ours.modules():  # or blocks that begin as the identity would hide half of it
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ours.start_from({})
    theirs: Any = composed(config, steps_per_epoch=4).train()
    for part in ("backbone", "projector", "predictor"):
        copied(getattr(ours, part, None), getattr(theirs, part, None))
    if isinstance(ours, BYOL | MoCoV2):
        copied(nn.Sequential(ours.backbone, ours.projector), theirs.encoder)
        copied(ours.target, theirs.momentum_encoder)
    if isinstance(ours, MoCoV2):
        theirs.criterion.memory_bank.bank.copy_(ours.queue)
    if isinstance(ours, SwAV):
        with torch.no_grad():
            ours.prototypes.weight.copy_(nn.functional.normalize(ours.prototypes.weight))
            (head,) = theirs.prototypes.heads
            head.weight.copy_(ours.prototypes.weight)
            head.bias.zero_()  # ours have none
    return ours, theirs


def copied(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    """Give lightly's part the weights of fastsiam's, if it has that part."""
    if ours is None or theirs is None:
        return
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(own.data)


def views_of(name: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(IMAGES, 3, 16, 16, generator=generator) for _ in range(VIEWS.get(name, 2))
    )


@pytest.mark.parametrize("name", HEADS)
def test_losses_and_gradients(name: str) -> None:
    """Through the whole network; BYOL's 2 - 2 cos, twice, is 4 more than what lightly minimises."""
    ours, theirs = both(name)
    views = views_of(name)
    loss = ours(views, torch.arange(IMAGES)).loss
    other = theirs.loss(views, step=0)
    torch.testing.assert_close(loss, other + (4 if name == "byol" else 0), rtol=1e-5, atol=1e-5)
    loss.backward()
    other.backward()
    parts = [part for part in ours.parts if hasattr(theirs, part)] + ["backbone"]
    parts = [part for part in parts if part != "prototypes"]  # see the next test
    for part in dict.fromkeys(parts):
        pairs = zip(
            getattr(ours, part).parameters(), getattr(theirs, part).parameters(), strict=True
        )
        for own, its in pairs:
            assert own.grad is not None and own.grad.abs().max() > 0
            torch.testing.assert_close(own.grad, its.grad, rtol=1e-3, atol=1e-5)


def test_prototypes_move_along_the_sphere_where_lightly_normalises_them_afterwards() -> None:
    """Our gradient is theirs without its part along the prototype, which normalising undoes."""
    ours, theirs = both("swav")
    views = views_of("swav")
    ours(views, torch.arange(IMAGES)).loss.backward()
    theirs.loss(views, step=0).backward()
    weight, gradient = cast(SwAV, ours).prototypes.weight, theirs.prototypes.heads[0].weight.grad
    along = (gradient * weight).sum(1, keepdim=True) * weight
    assert along.abs().max() > 1e-4
    torch.testing.assert_close(weight.grad, gradient - along, rtol=1e-3, atol=1e-6)


def test_prototypes_are_frozen_for_as_many_steps() -> None:
    ours, theirs = both("swav", frozen_epochs=0.5)  # 2 of 4 steps
    for step in range(4):
        ours.zero_grad()
        theirs.zero_grad()
        ours(views_of("swav"), torch.arange(IMAGES)).loss.backward()
        ours.before_optimizer(at=Moment(step, 4, 4))
        theirs.loss(views_of("swav"), step=step).backward()
        moved = theirs.prototypes.heads[0].weight.grad is not None
        assert moved == (step >= 2)
        assert (cast(SwAV, ours).prototypes.weight.grad is not None) == moved


def test_the_queue_takes_the_same_keys_in_the_same_places() -> None:
    """Two steps of 16 keys each, into 40 rows; at the end lightly cuts off what ours wraps."""
    ours, theirs = both("mocov2")
    own, bank = cast(MoCoV2, ours), theirs.criterion.memory_bank
    before = own.queue.clone()
    for step in range(2):
        output = ours(views_of("mocov2"), torch.arange(IMAGES))
        theirs.loss(views_of("mocov2"), step=step)
        with torch.no_grad():
            ours.after_step([output], at=Moment(step, 4, 4))
    assert not torch.equal(own.queue[:32], before[:32])
    torch.testing.assert_close(own.queue, bank.bank, rtol=1e-4, atol=1e-5)


def test_momentum_encoders_follow_alike() -> None:
    from lightly.models.utils import update_momentum

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    ours = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).requires_grad_(False)
    theirs = copy.deepcopy(ours)
    before = copy.deepcopy(ours)
    update_average(ours, *network, momentum=0.9)
    update_momentum(network, theirs, m=0.9)
    first, as_before = next(ours.parameters()), next(before.parameters())
    assert not torch.equal(first, as_before)
    for own, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, its)
