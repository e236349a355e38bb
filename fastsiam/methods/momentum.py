"""Momentum encoders, and queues of earlier projections."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from .base import Moment


def momentum_copy(*parts: nn.Module) -> nn.Sequential:
    """Return a sequential copy of some modules whose parameters need no gradient.

    Its BN layers have their own statistics, as in the authors' code of MoCo and BYOL.
    """
    return copy.deepcopy(nn.Sequential(*parts)).requires_grad_(False)


def copy_state(copied: nn.Module, *parts: nn.Module) -> None:
    """Copy the parts' weights and BN statistics to a ``momentum_copy``."""
    copied.load_state_dict(nn.Sequential(*parts).state_dict())


def update_average(copied: nn.Module, *parts: nn.Module, momentum: float) -> None:
    """Update the parameters of a ``momentum_copy`` as a moving average of those of its parts.

    Args:
        copied: the ``momentum_copy``, changed in place.
        parts: the modules that it was copied from.
        momentum: weight of the old values, 0 to 1.
    """
    own: list[Tensor] = list(nn.Sequential(*parts).parameters())
    torch._foreach_lerp_(list(copied.parameters()), own, 1 - momentum)


def rising_momentum(momentum: float, at: Moment) -> float:
    """Return a momentum that rises to 1 along a cosine (Grill et al. 2020, section 3.3)."""
    return 1 - (1 - momentum) * (math.cos(math.pi * at.progress) + 1) / 2


def push(queue: Tensor, pushed: Tensor, rows: Tensor) -> None:
    """Overwrite the oldest rows of a queue with new ones, in place.

    Args:
        queue: (K, ...).
        pushed: () int64, number of rows added so far; row i is stored at i modulo K.
        rows: (R, ...), the oldest first.
    """
    places = torch.arange(len(rows), device=rows.device) + pushed
    most = len(queue)
    queue.index_copy_(0, (places % most)[-most:], rows[-most:])
    pushed += len(rows)
