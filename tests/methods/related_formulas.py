"""The formulas of SimCLR, MoCo v2, BYOL and SwAV in float64, without fastsiam code.

- SimCLR: equation 1 and algorithm 1 of Chen et al. 2020; predictor and stop-gradient as in the
  footnote of section 6.2 of SimSiam.
- MoCo: equation 1 and algorithm 1 of He et al. 2019; both directions as in SimSiam's appendix C.
- BYOL: equations 1 to 3 and section 3.3 of Grill et al. 2020.
- SwAV: equations 1 to 5 and appendix A of Caron et al. 2020, and equation 6 for any number of
  views; the prototypes are normalised in the graph, as section 6.2 of SimSiam describes.

Backbone and layers come from ``formulas``. All tensors cover the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
from torch import Tensor
from torch.nn import functional as F

from .formulas import Weights, features, mlp, predict, unit

HEADS: dict[str, Callable[[int], list[bool]]] = {
    "simclr": lambda layers: [True] * layers,
    "mocov2": lambda layers: [False] * layers,
    "byol": lambda layers: [True] * (layers - 1) + [False],
    "swav": lambda layers: [True] * (layers - 1) + [False],
}
"""Whether each layer of a method's projector has BN."""


def project(method: str, weights: Weights, images: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return the (N, d) projections. Only BN mixes images, so groups are processed separately.

    The rows of ``groups`` are the indices of images that share BN statistics; None: all do.
    """
    layers = sum(f"projector.{3 * i}.weight" in weights for i in range(9))
    if groups is None:
        groups = torch.arange(len(images))[None]
    rows = [
        mlp(weights, features(weights, images[group]), "projector", HEADS[method](layers))
        for group in groups
    ]
    return torch.cat(rows)[groups.flatten().argsort()]


def nt_xent(anchors: Sequence[Tensor], candidates: Sequence[Tensor], temperature: float) -> Tensor:
    """Return NT-Xent: each of the 2 N anchors against all projections except its own."""
    images, (a, o) = len(anchors[0]), (unit(torch.cat([*rows])) for rows in (anchors, candidates))
    logits = (a @ o.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, (torch.arange(2 * images) + images) % (2 * images))


def simclr(
    weights: Weights,
    views: Sequence[Tensor],
    *,
    temperature: float,
    against: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the loss against constant projections; ``against=None``: without a stop-gradient."""
    zs = [project("simclr", weights, view) for view in views]
    return nt_xent([predict(weights, z) for z in zs], against or zs, temperature)


def mocov2(
    weights: Weights,
    views: Sequence[Tensor],
    *,
    temperature: float,
    keys: Sequence[Tensor],
    queue: Tensor,
    symmetric: bool = True,
    groups: Tensor | None = None,
) -> Tensor:
    """Return InfoNCE between each view (or only the first) and the other view's key and the queue.

    Args:
        keys: (N, d) projections by the momentum encoder, one tensor per view.
        queue: (K, d) normalised keys of earlier batches.
    """
    terms = []
    for view in (0, 1) if symmetric else (0,):
        q = unit(project("mocov2", weights, views[view], groups))
        positive = (q * unit(keys[1 - view])).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ queue.T], 1) / temperature
        terms.append(F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64)))
    return torch.stack(terms).mean()


def byol(weights: Weights, views: Sequence[Tensor], *, targets: Sequence[Tensor]) -> Tensor:
    """Return the squared distance of normalised predictions and targets, summed over both views."""
    terms = []
    for view in (0, 1):
        p = predict(weights, project("byol", weights, views[view]))
        terms.append(((unit(p) - unit(targets[1 - view])) ** 2).sum(1).mean())
    return torch.stack(terms).sum()


def sinkhorn(scores: Tensor, *, epsilon: float, rounds: int) -> Tensor:
    """Return (B, K) codes, each row a distribution, for (B, K) scores.

    Q is K x B. Each round scales its rows to sum to 1 / K, then its columns to sum to 1 / B.
    """
    images, prototypes = scores.shape
    q = torch.exp(scores.T / epsilon)
    for _ in range(rounds):
        q = q / (q.sum(1, keepdim=True) * prototypes)
        q = q / (q.sum(0, keepdim=True) * images)
    return q.T * images


def scores(weights: Weights, rows: Tensor) -> Tensor:
    """Return the (B, K) cosines between rows and prototypes."""
    return unit(rows) @ unit(weights["prototypes.weight"]).T


def codes(
    weights: Weights,
    views: Sequence[Tensor],
    *,
    epsilon: float,
    rounds: int,
    queues: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the codes of the first two views, balanced over the batch and each view's queue."""
    view_codes = []
    for view in (0, 1):
        z = project("swav", weights, views[view])
        rows = torch.cat([z, queues[view]]) if queues else z
        view_codes.append(sinkhorn(scores(weights, rows), epsilon=epsilon, rounds=rounds)[: len(z)])
    return view_codes


def swav(
    weights: Weights, views: Sequence[Tensor], *, temperature: float, of: Sequence[Tensor]
) -> Tensor:
    """Return the swapped prediction loss: the codes of two views, predicted from all others."""
    terms = []
    for code, view in permutations(range(len(views)), 2):
        if code < 2:
            p = predict(weights, project("swav", weights, views[view]))
            logs = (scores(weights, p) / temperature).log_softmax(1)
            terms.append(-(of[code] * logs).sum(1).mean())
    return torch.stack(terms).mean()


def momentum_at(base: float, step: int, steps: int) -> float:
    """Return BYOL's momentum at a step: it increases to 1 along a cosine."""
    return 1 - (1 - base) * (math.cos(math.pi * step / steps) + 1) / 2
