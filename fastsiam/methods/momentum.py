"""Momentum encoders, and queues of earlier projections."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class MomentumEncoder(nn.Sequential):
    """A copy of some modules, in sequence, whose parameters require no gradient.

    Its BN layers keep their own running statistics, as in the authors' code of MoCo and BYOL.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*copy.deepcopy(parts))
        self.requires_grad_(False)
        self._parts = parts  # a tuple, so that they are not registered as submodules

    def copy_parts(self) -> None:
        """Copy the weights and BN statistics of the original modules."""
        self.load_state_dict(nn.Sequential(*self._parts).state_dict())

    def follow(self, momentum: float) -> None:
        """Update the parameters as a moving average of the original modules' parameters.

        Args:
            momentum: weight of the old values, in [0, 1].
        """
        original_parameters: list[Tensor] = list(nn.Sequential(*self._parts).parameters())
        torch._foreach_lerp_(list(self.parameters()), original_parameters, 1 - momentum)


def rising_momentum(momentum: float, progress: float) -> float:
    """Return a momentum that rises to 1 along a cosine (Grill et al. 2020, section 3.3).

    Args:
        momentum: initial momentum.
        progress: fraction of the schedule completed.
    """
    return 1 - (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2


def push(queue: Tensor, pushed: Tensor, rows: Tensor) -> None:
    """Overwrite the oldest rows of a queue with new ones, in place.

    Args:
        queue: (K, ...).
        pushed: () int64, number of rows added so far; updated. Row i is stored at i modulo K.
        rows: (R, ...), oldest first.
    """
    positions = torch.arange(len(rows), device=rows.device) + pushed
    capacity = len(queue)
    queue.index_copy_(0, (positions % capacity)[-capacity:], rows[-capacity:])
    pushed += len(rows)
