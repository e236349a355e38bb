"""What methods with a memory share: momentum encoders, and queues of earlier projections."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from .base import Moment


def momentum_copy(*parts: nn.Module) -> nn.Sequential:
    """Return a copy of some parts, one after the other, that no gradient moves.

    Its BN has statistics of its own, as in the authors' code of MoCo and BYOL.
    """
    return copy.deepcopy(nn.Sequential(*parts)).requires_grad_(False)


def renew(copied: nn.Module, *parts: nn.Module) -> None:
    """Make a ``momentum_copy`` what its parts are now, BN's statistics included."""
    copied.load_state_dict(nn.Sequential(*parts).state_dict())


def follow(copied: nn.Module, *parts: nn.Module, momentum: float) -> None:
    """Move the parameters of a ``momentum_copy`` towards those of its parts, in one call.

    Args:
        copied: keeps ``momentum`` of itself.
        parts: of which it was made.
        momentum: 0 to 1.
    """
    own: list[Tensor] = list(nn.Sequential(*parts).parameters())
    torch._foreach_lerp_(list(copied.parameters()), own, 1 - momentum)


def rising(momentum: float, at: Moment) -> float:
    """Return a momentum that rises to 1 along a cosine (Grill et al. 2020, section 3.3)."""
    return 1 - (1 - momentum) * (math.cos(math.pi * at.progress) + 1) / 2


def push(queue: Tensor, pushed: Tensor, rows: Tensor) -> None:
    """Write rows over the oldest of a queue, in place.

    Args:
        queue: (K, ...).
        pushed: () int64, how many rows it was given until now; row i of all lies at i modulo K.
        rows: (R, ...), the oldest first.
    """
    places = torch.arange(len(rows), device=rows.device) + pushed
    most = len(queue)
    queue.index_copy_(0, (places % most)[-most:], rows[-most:])
    pushed += len(rows)
