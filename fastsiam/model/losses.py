"""The losses that methods are made of: of a prediction against a target, or against many.

Computed in float32 with autocast off: normalising in half precision overflows for large inputs. A
caller that wants the stop-gradient detaches the targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def negative_cosine(p: Tensor, z: Tensor) -> Tensor:
    """Negative cosine similarity (equation 1 of the paper), averaged over the batch.

    Args:
        p: (N, d) predictions, any floating type.
        z: (N, d) targets.

    Returns:
        Scalar float32 in [-1, 1].
    """
    with torch.autocast(p.device.type, enabled=False):
        return -F.cosine_similarity(p.float(), z.float(), dim=1, eps=1e-8).mean()


def softmax_cross_entropy(p: Tensor, z: Tensor) -> Tensor:
    """Cross-entropy of the softmax over channels (section 4.5), averaged over the batch.

    Args:
        p: (N, d) predictions, any floating type.
        z: (N, d) targets: "the probabilities of belonging to each of d pseudo-categories".

    Returns:
        Scalar float32, 0 or more; log d where both are constant.
    """
    with torch.autocast(p.device.type, enabled=False):
        return cross_entropy(F.softmax(z.float(), 1), p)


def cross_entropy(shares: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy of the softmax of logits with given shares, averaged over the batch.

    Args:
        shares: (N, K) float32, each row of sum 1.
        logits: (N, K), any floating type.

    Returns:
        Scalar float32, 0 or more.
    """
    with torch.autocast(logits.device.type, enabled=False):
        return -(shares * F.log_softmax(logits.float(), 1)).sum(1).mean()


def unit(x: Tensor) -> Tensor:
    """Normalise rows to length 1, in float32: (N, d) to (N, d)."""
    return F.normalize(x.float(), dim=1)


def nt_xent(
    anchors: Sequence[Tensor], others: Sequence[Tensor], *, first: int, temperature: float
) -> Tensor:
    """SimCLR's loss (Chen et al. 2020, equation 1): of each anchor among all projections.

    Each anchor's positive is the other view of its image. It is compared with the projections of
    both views of all images, except for the one that it comes from.

    Args:
        anchors: (N, d) of each of two views, l2-normalised, of this rank's images.
        others: (B, d) of each of two views, l2-normalised, of all ranks' images.
        first: where this rank's images begin among all.
        temperature: of the softmax.

    Returns:
        Scalar float32: the mean over 2 N anchors.
    """
    images, batch = len(anchors[0]), len(others[0])
    with torch.autocast(anchors[0].device.type, enabled=False):
        logits = torch.cat(list(anchors)) @ torch.cat(list(others)).T / temperature
        own = torch.arange(first, first + images, device=logits.device)
        same, positive = torch.cat([own, own + batch]), torch.cat([own + batch, own])
        logits = logits.scatter(1, same[:, None], -torch.inf)
        return F.cross_entropy(logits, positive)


def info_nce(queries: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
    """MoCo's loss (He et al. 2020, equation 1): of each query among its key and the negatives.

    Args:
        queries: (N, d) float32, l2-normalised.
        keys: (N, d), each query's positive, l2-normalised.
        negatives: (K, d), l2-normalised.
        temperature: of the softmax.

    Returns:
        Scalar float32: the mean over the queries.
    """
    with torch.autocast(queries.device.type, enabled=False):
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ negatives.T], 1) / temperature
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


def sinkhorn(scores: Tensor, *, epsilon: float, rounds: int, weights: Tensor) -> Tensor:
    """Share images out among prototypes, each prototype getting as much (Cuturi 2013).

    SwAV's assignments (Caron et al. 2020, equations 3 to 5): each round gives all prototypes the
    same sum, and then all images. Constant factors of its matrices are left out: the next division
    takes them away.

    Args:
        scores: (B, K) float32 cosines.
        epsilon: the smaller, the nearer to one prototype for each image.
        rounds: one or more.
        weights: (B,) float32, 1 for images that count, 0 for others.

    Returns:
        (B, K) float32; rows of images that count have sum 1.
    """
    with torch.autocast(scores.device.type, enabled=False):
        shares = torch.exp((scores - scores.detach().max()) / epsilon) * weights[:, None]
        for _ in range(rounds):
            for axis in (0, 1):
                sums = shares.sum(axis, keepdim=True)
                # Nothing of nothing is nothing, and its gradient is finite.
                shares = shares / torch.where(sums > 0, sums, 1.0)
        return shares
