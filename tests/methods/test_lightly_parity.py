"""Losses equal those of lightly's modules on the same tensors.

Weights are copied from fastsiam's modules in parameter order, which is the same in lightly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsiam.config import METHOD_CONFIGS, AugmentConfig, ModelConfig, OptimConfig, TrainConfig
from fastsiam.methods import Method, build_method
from fastsiam.methods.byol import BYOL
from fastsiam.methods.mocov2 import MoCoV2
from fastsiam.methods.swav import SwAV
from tests.conftest import import_or_skip

import_or_skip("lightly", "peers", allow_module_level=True)

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


def build_with_same_weights(name: str) -> tuple[Method, Any]:
    """Return fastsiam's method and lightly's modules with the same weights."""
    from fastsiam.bench.lightly_methods import compose

    method = METHOD_CONFIGS[name](**HEADS[name])
    config = TrainConfig(
        augment=AugmentConfig.alike(VIEWS.get(name, 2), crop=16),
        model=ModelConfig(backbone="resnet10", stem="cifar", width=4, method=method),
        optim=OptimConfig(epochs=1, batch=IMAGES),
    )
    torch.manual_seed(0)
    ours = build_method(config.model, images=IMAGES).train()
    for module in ours.modules():  # zero-initialised residual blocks would hide half of the network
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ours.start_from({})
    theirs: Any = compose(config, steps_per_epoch=4).train()
    for part in ("backbone", "projector", "predictor"):
        copy_weights(getattr(ours, part, None), getattr(theirs, part, None))
    if isinstance(ours, BYOL | MoCoV2):
        copy_weights(nn.Sequential(ours.backbone, ours.projector), theirs.encoder)
        copy_weights(ours.target, theirs.momentum_encoder)
    if isinstance(ours, MoCoV2):
        theirs.criterion.memory_bank.bank.copy_(ours.queue)
    if isinstance(ours, SwAV):
        with torch.no_grad():
            ours.prototypes.weight.copy_(nn.functional.normalize(ours.prototypes.weight))
            (head,) = theirs.prototypes.heads
            head.weight.copy_(ours.prototypes.weight)
            head.bias.zero_()  # fastsiam's prototypes have no bias
    return ours, theirs


def copy_weights(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    """Copy the weights of a fastsiam module to lightly's module, if both exist."""
    if ours is None or theirs is None:
        return
    for our_weight, their_weight in zip(ours.parameters(), theirs.parameters(), strict=True):
        their_weight.data.copy_(our_weight.data)


@pytest.mark.parametrize("name", HEADS)
def test_losses_equal_lightly(name: str) -> None:
    """Compare entire networks. BYOL's 2 - 2 cos, twice, is 4 more than lightly's loss.

    For gradients and queues see ``test_formulas.py``.
    """
    ours, theirs = build_with_same_weights(name)
    views = torch.randn(VIEWS.get(name, 2), IMAGES, 3, 16, 16).unbind()
    loss = ours(views, torch.arange(IMAGES)).loss
    other = theirs.loss(views, step=0)
    torch.testing.assert_close(loss, other + (4 if name == "byol" else 0), rtol=1e-5, atol=1e-5)
