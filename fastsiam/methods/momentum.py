"""Momentum encoders, and queues of earlier projections."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class MomentumEncoder(nn.Sequential):
    """A sequential copy of some modules whose parameters need no gradient.

    Its BN layers have their own statistics, as in the authors' code of MoCo and BYOL.
    """

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*copy.deepcopy(parts))
        self.requires_grad_(False)
        self._parts = parts  # in a tuple, so that they are no submodules

    def copy_parts(self) -> None:
        """Copy the parts' weights and BN statistics."""
        self.load_state_dict(nn.Sequential(*self._parts).state_dict())

    def follow(self, momentum: float) -> None:
        """Update the parameters as a moving average of the parts' parameters.

        Args:
            momentum: weight of the old values, 0 to 1.
        """
        own: list[Tensor] = list(nn.Sequential(*self._parts).parameters())
        torch._foreach_lerp_(list(self.parameters()), own, 1 - momentum)


def rising_momentum(momentum: float, progress: float) -> float:
    """Return a momentum that rises to 1 along a cosine (Grill et al. 2020, section 3.3).

    Args:
        momentum: at the start.
        progress: share of the schedule that is done.
    """
    return 1 - (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2


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
