"""Loss functions that compare predictions with targets, and SwAV's assignments.

They are computed in float32 without autocast, because normalisation in half precision overflows for
large inputs. For a stop-gradient, the caller detaches the targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return SimSiam's negative cosine similarity (equation 1), averaged over the batch.

    Args:
        p: (N, d) predictions, any floating type.
        z: (N, d) targets.

    Returns:
        Scalar float32 in [-1, 1].
    """
    with torch.autocast(p.device.type, enabled=False):
        return -F.cosine_similarity(p.float(), z.float(), dim=1, eps=1e-8).mean()


def softmax_cross_entropy(p: Tensor, z: Tensor) -> Tensor:
    """Return SimSiam's softmax cross-entropy over channels (section 4.5), averaged over the batch.

    Args:
        p: (N, d) predictions, any floating type.
        z: (N, d) targets: "the probabilities of belonging to each of d pseudo-categories".

    Returns:
        Scalar float32, at least 0; log d if the rows of p and z are constant.
    """
    with torch.autocast(p.device.type, enabled=False):
        return cross_entropy(F.softmax(z.float(), 1), p)


def cross_entropy(shares: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy of logits with target probabilities, averaged over the batch.

    Args:
        shares: (N, K) float32 target probabilities; each row has sum 1.
        logits: (N, K), any floating type.

    Returns:
        Scalar float32, at least 0.
    """
    with torch.autocast(logits.device.type, enabled=False):
        return -(shares * F.log_softmax(logits.float(), 1)).sum(1).mean()


def unit(x: Tensor) -> Tensor:
    """Normalise rows to length 1: (N, d) of any floating type to (N, d) float32."""
    return F.normalize(x.float(), dim=1)


def nt_xent(
    anchors: Sequence[Tensor], others: Sequence[Tensor], *, first: int, temperature: float
) -> Tensor:
    """Return SimCLR's loss (Chen et al. 2020, equation 1).

    The positive of each anchor is the other view of its image. The anchor is compared with both
    views of all images, except itself.

    Args:
        anchors: this rank's projections, l2-normalised: (N, d) for each of two views.
        others: all ranks' projections, l2-normalised: (B, d) for each of two views.
        first: index of this rank's first image among those of all ranks.
        temperature: softmax temperature.

    Returns:
        Scalar float32, the mean over 2 N anchors.
    """
    images, batch = len(anchors[0]), len(others[0])
    with torch.autocast(anchors[0].device.type, enabled=False):
        logits = torch.cat(list(anchors)) @ torch.cat(list(others)).T / temperature
        columns = torch.arange(first, first + images, device=logits.device)
        self_columns, positive = (
            torch.cat([columns, columns + batch]),
            torch.cat([columns + batch, columns]),
        )
        logits = logits.scatter(1, self_columns[:, None], -torch.inf)
        return F.cross_entropy(logits, positive)


def info_nce(queries: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
    """Return MoCo's loss (He et al. 2020, equation 1).

    Args:
        queries: (N, d) float32, l2-normalised.
        keys: (N, d), the positive of each query, l2-normalised.
        negatives: (K, d), l2-normalised.
        temperature: softmax temperature.

    Returns:
        Scalar float32, the mean over the queries.
    """
    with torch.autocast(queries.device.type, enabled=False):
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ negatives.T], 1) / temperature
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


def sinkhorn(scores: Tensor, *, epsilon: float, rounds: int, weights: Tensor) -> Tensor:
    """Assign images to prototypes with equal total weight for each prototype (Cuturi 2013).

    These are SwAV's assignments (Caron et al. 2020, equations 3 to 5). Each round divides by the
    total of each prototype, then by that of each image. Constant factors are left out, because the
    next division cancels them.

    Args:
        scores: (B, K) float32 cosines.
        epsilon: temperature; small values give almost one-hot assignments.
        rounds: number of rounds, at least 1.
        weights: (B,) float32, 1 for images to assign, 0 for images to ignore.

    Returns:
        (B, K) float32; rows with weight 1 have sum 1.
    """
    with torch.autocast(scores.device.type, enabled=False):
        shares = torch.exp((scores - scores.detach().max()) / epsilon) * weights[:, None]
        for _ in range(rounds):
            for axis in (0, 1):
                sums = shares.sum(axis, keepdim=True)
                # 0/0 is defined as 0, with a finite gradient.
                shares = shares / torch.where(sums > 0, sums, 1.0)
        return shares
