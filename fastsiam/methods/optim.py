"""Optimizers and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsiam.config import OptimConfig
from fastsiam.methods import ParamGroup

SETTINGS = ("momentum", "weight_decay", "trust", "adapt_all")
"""Settings of a parameter group, except the learning rate, which every step sets."""


def build_optimizer(config: OptimConfig, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
    """Build the optimizer for a method's parameter groups, with zeroed momentum buffers.

    Raises:
        ValueError: two groups have the same name.
    """
    if len({group.name for group in groups}) < len(groups):
        raise ValueError("two parameter groups have the same name, which selects their rates")
    param_groups = [
        {"params": group.params, "name": group.name}
        | ({} if group.weight_decay is None else {"weight_decay": group.weight_decay})
        for group in groups
    ]
    defaults: dict[str, Any] = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    defaults["lr"] = peak_lr(config)
    if config.optimizer == "lars":
        return Lars(param_groups, **defaults, trust=config.lars_trust, adapt_all=config.lars_all)
    return init_momentum_buffers(torch.optim.SGD(param_groups, **defaults, fused=True))


def init_momentum_buffers(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create a zero momentum buffer for every parameter, before the first step.

    Otherwise the fused kernel leaves it uninitialised if loss scaling skips the first step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888).

    LARS is momentum SGD in which a weight w with gradient g uses the gradient

        (g + wd w) * trust |w| / (|g| + wd |w|)

    instead of g + wd w, unless |w| or |g| is zero. One-dimensional parameters (BN and biases) are
    neither scaled nor decayed, as in SimCLR (Chen et al. 2020, appendix B.9), unless ``adapt_all``.
    torch does not provide LARS. A step does not synchronise with the device, even under a
    ``GradScaler``. If gradients overflowed, it leaves weights and momentum buffers unchanged.

    Args:
        groups: parameters or parameter groups, as for torch's optimizers.
        lr: learning rate.
        momentum: in [0, 1).
        weight_decay: wd in the formula.
        trust: trust coefficient in the formula (0.001 in the paper).
        adapt_all: scale and decay one-dimensional parameters too.
    """

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt_all: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(groups, defaults | {"trust": trust, "adapt_all": adapt_all})
        init_momentum_buffers(self)
        self._step_supports_amp_scaling = True  # tells GradScaler that step() handles overflow

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; parameters without a gradient stay unchanged."""
        assert closure is None
        scale: Tensor | None = getattr(self, "grad_scale", None)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            scaled_params = [p for p in params if p.dim() > 1 or group["adapt_all"]]
            plain_params = [p for p in params if not (p.dim() > 1 or group["adapt_all"])]
            updates = _scaled_gradients(
                scaled_params,
                _unscaled_gradients(scaled_params, scale),
                group["weight_decay"],
                group["trust"],
            )
            updates += _unscaled_gradients(plain_params, scale)
            ordered = scaled_params + plain_params
            buffers = [self.state[p]["momentum_buffer"] for p in ordered]
            if overflow is None:
                torch._foreach_mul_(buffers, group["momentum"])
                torch._foreach_add_(buffers, updates)
                torch._foreach_add_(ordered, buffers, alpha=-group["lr"])
                continue
            skip = overflow.bool()
            torch._foreach_mul_(buffers, torch.where(skip, 1.0, group["momentum"]))
            torch._foreach_add_(buffers, [torch.where(skip, 0.0, update) for update in updates])
            rate = torch.where(skip, 0.0, -group["lr"])
            torch._foreach_add_(ordered, torch._foreach_mul(buffers, rate))


def _unscaled_gradients(weights: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    gradients = [w.grad for w in weights if w.grad is not None]
    if scale is None or not gradients:
        return gradients
    return list(torch._foreach_mul(gradients, scale.reciprocal()))


def _scaled_gradients(
    weights: list[Tensor], gradients: list[Tensor], weight_decay: float, trust: float
) -> list[Tensor]:
    if not weights:
        return []
    norms = torch.stack(torch._foreach_norm(weights))
    gradient_norms = torch.stack(torch._foreach_norm(gradients))
    scales = trust * norms / (gradient_norms + weight_decay * norms)
    # Above 1e-30, not 0: a subnormal gradient norm would make the scale infinite.
    scales = torch.where((norms > 0) & (gradient_norms > 1e-30), scales, 1.0)
    decayed = torch._foreach_add(gradients, weights, alpha=weight_decay)
    return list(torch._foreach_mul(decayed, list(scales.unbind())))


def peak_lr(config: OptimConfig) -> float:
    """Return the peak learning rate, "lr x BatchSize / 256" (section 3 of the SimSiam paper).

    The batch has all images of an optimizer step, over all ranks and micro-batches.
    """
    return config.lr * config.batch / 256


def cosine(peak: float, step: int, *, total: int, end: float = 0.0) -> float:
    """Return the rate at a step of a cosine decay.

    Args:
        peak: rate at the first step.
        step: step number, from 0.
        total: number of steps.
        end: rate after the last step.
    """
    return end + (peak - end) * (0.5 * (1 + math.cos(math.pi * step / max(1, total))))


def rates_at(
    config: OptimConfig, groups: Sequence[ParamGroup], step: int, steps_per_epoch: int
) -> dict[str, float]:
    """Return the learning rate of each parameter group at a step, by group name.

    Groups with schedule "cosine" warm up and decay. "constant" groups stay at the peak rate. Steps
    are counted from 0.
    """
    peak, decaying_lr = peak_lr(config), decaying_rate(config, step, steps_per_epoch)
    return {group.name: decaying_lr if group.schedule == "cosine" else peak for group in groups}


def decaying_rate(config: OptimConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of the groups with schedule "cosine" at a step, counted from 0.

    It rises linearly to the peak during the warm-up, then decays along a cosine.
    """
    peak, warmup = peak_lr(config), round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        start = peak * config.warmup_from
        return start + (peak - start) * (step + 1) / warmup
    total = config.epochs * steps_per_epoch - warmup
    return cosine(peak, step - warmup, total=total, end=peak * config.lr_end)
