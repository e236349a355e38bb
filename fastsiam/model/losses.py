"""The loss of one prediction against one projection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Negative cosine similarity (equation 1 of the paper), averaged over the batch.

    Computed in float32 with autocast off: normalising in half precision overflows for large inputs.

    Args:
        p: (N, d) predictions, any floating type.
        z: (N, d) projections; a caller that wants the stop-gradient detaches them.

    Returns:
        Scalar float32 in [-1, 1].
    """
    with torch.autocast(p.device.type, enabled=False):
        return -F.cosine_similarity(p.float(), z.float(), dim=1, eps=1e-8).mean()
