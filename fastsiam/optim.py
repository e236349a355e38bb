"""The optimizer and its learning rates."""

from __future__ import annotations

import math
from typing import Any

import torch

from fastsiam.config import OptimConfig


def build_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.SGD:
    """Build SGD over a method's parameter groups, in torch's fused implementation."""
    optimizer = torch.optim.SGD(
        groups,
        lr=peak_lr(config),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # The fused kernel would leave a first momentum that a loss-scaled step skips unset.
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def peak_lr(config: OptimConfig) -> float:
    """The scaled rate: "lr x BatchSize / 256" (section 3).

    The batch is that of one optimizer step over all ranks and accumulated parts, so neither the
    number of ranks nor of parts enters.
    """
    return config.lr * config.batch / 256


def lr_at(config: OptimConfig, step: int, steps_per_epoch: int) -> dict[str, float]:
    """Return the learning rate of each parameter group at a step.

    Cosine from the peak at the end of the warm-up to 0 at the end of training, per step; linear
    before. The predictor's rate neither warms up nor decays, unless ``predictor_lr`` is "cosine".

    Args:
        config: base rate, batch and schedule.
        step: optimizer step, from 0.
        steps_per_epoch: optimizer steps in an epoch.
    """
    peak, total = peak_lr(config), config.epochs * steps_per_epoch
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        encoder = peak * (step + 1) / warmup
    else:
        encoder = peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return {"encoder": encoder, "predictor": peak if config.predictor_lr == "constant" else encoder}


def set_lr(optimizer: torch.optim.Optimizer, rates: dict[str, float]) -> None:
    """Give each parameter group its rate."""
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
