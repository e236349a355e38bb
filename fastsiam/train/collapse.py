"""Collapse metrics: the spread and the effective rank of the embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_RANK_ROWS = 1024


def z_std(z: Tensor) -> Tensor:
    """Measure the spread of projections (section 4.1 of the SimSiam paper).

    Args:
        z: (N, d) projections of the global batch.

    Returns:
        Scalar: standard deviation of each channel of the l2-normalised z, averaged over channels,
        times sqrt(d). It is 1 if z is spread over the sphere and 0 if z collapsed to one point.
    """
    z = F.normalize(z.float(), dim=1)
    return z.std(0, unbiased=False).mean() * math.sqrt(z.shape[1])


def gram(z: Tensor) -> Tensor:
    """Return the Gram matrix of the l2-normalised rows, or of the columns if those are fewer.

    Args:
        z: (N, d) projections; only the first 1024 rows are used.

    Returns:
        (n, n) float32 on the device of z, with n = min(N, 1024, d); input of ``rank_of_gram``.
    """
    z = F.normalize(z[:_RANK_ROWS].float(), dim=1)
    return z @ z.T if z.shape[0] < z.shape[1] else z.T @ z


def rank_of_gram(gram: Tensor) -> Tensor:
    """Compute the effective rank of projections; detects dimensional collapse, unlike ``z_std``.

    Args:
        gram: (n, n) float32, the result of ``gram``.

    Returns:
        float64 scalar: exp of the entropy of the normalised singular values of the l2-normalised
        projections (Roy and Vetterli 2007; RankMe, Garrido et al. 2023); between 1 and n.
    """
    singular = torch.linalg.eigvalsh(gram.double()).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-30)
    return torch.exp(-torch.xlogy(share, share).sum())
