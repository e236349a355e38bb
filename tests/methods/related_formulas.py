"""The formulas of SimCLR, MoCo v2, BYOL and SwAV in float64 numpy, without fastsiam code.

- SimCLR: equation 1 and algorithm 1 of Chen et al. 2020; predictor and stop-gradient as in the
  footnote of section 6.2 of SimSiam.
- MoCo: equation 1 and algorithm 1 of He et al. 2019; both directions as in SimSiam's appendix C.
- BYOL: equations 1 to 3 and section 3.3 of Grill et al. 2020.
- SwAV: equations 1 to 5 and appendix A of Caron et al. 2020, and equation 6 for any number of
  views; the prototypes are normalised in the graph, as section 6.2 of SimSiam describes.

Backbone, layers and central differences come from ``formulas``. All arrays cover the global
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from .formulas import Array, Weights, features, mlp, predict, unit

HEADS: dict[str, Callable[[int], list[bool]]] = {
    "simclr": lambda layers: [True] * layers,
    "mocov2": lambda layers: [False] * layers,
    "byol": lambda layers: [True] * (layers - 1) + [False],
    "swav": lambda layers: [True] * (layers - 1) + [False],
}
"""Whether each layer of a method's projector has BN."""

Groups = Sequence[NDArray[np.int64]]
"""For each group of images that share BN statistics, their indices in the batch."""


def project(method: str, weights: Weights, images: Array, groups: Groups = ()) -> Array:
    """Return the (N, d) projections. Only BN mixes images, so groups are processed separately."""
    layers = sum(f"projector.{3 * i}.weight" in weights for i in range(9))
    rows_by_image: dict[int, Array] = {}
    for group in groups or [np.arange(len(images))]:
        x = features(weights, images[group])
        rows = mlp(weights, x, "projector", HEADS[method](layers))
        rows_by_image.update(zip(group.tolist(), rows, strict=True))
    return np.stack([rows_by_image[image] for image in range(len(images))])


def query_groups(images: int, size: int) -> Groups:
    """Return groups of consecutive images."""
    return np.split(np.arange(images), images // size)


def key_groups(images: int, size: int) -> Groups:
    """Return groups of strided images: each has equally many images of every query group."""
    order = [i for first in range(size) for i in range(first, images, size)]
    return np.split(np.array(order), images // size)


def log_softmax(logits: Array) -> Array:
    lower: Array = logits - logits.max(1, keepdims=True)
    total: Array = np.exp(lower).sum(1, keepdims=True)
    return lower - np.log(total)


def cross_entropy(logits: Array, right: NDArray[np.int64]) -> float:
    """Return the mean over rows of -log softmax at the correct indices."""
    return float(-log_softmax(logits)[np.arange(len(logits)), right].mean())


def nt_xent(anchors: Sequence[Array], candidates: Sequence[Array], temperature: float) -> float:
    """Return NT-Xent: each of the 2 N anchors against all projections except its own."""
    images, (a, o) = len(anchors[0]), (unit(np.concatenate(rows)) for rows in (anchors, candidates))
    logits = a @ o.T / temperature
    np.fill_diagonal(logits, -np.inf)
    return cross_entropy(logits, (np.arange(2 * images) + images) % (2 * images))


def simclr(
    weights: Weights,
    views: Sequence[Array],
    *,
    temperature: float,
    against: Sequence[Array] | None = None,
) -> float:
    """Return the loss against constant projections; ``against=None``: without a stop-gradient."""
    zs = [project("simclr", weights, view) for view in views]
    return nt_xent([predict(weights, z) for z in zs], against or zs, temperature)


def mocov2(
    weights: Weights,
    views: Sequence[Array],
    *,
    temperature: float,
    keys: Sequence[Array],
    queue: Array,
    symmetric: bool = True,
    groups: Groups = (),
) -> float:
    """Return InfoNCE between each view (or only the first) and the other view's key and the queue.

    Args:
        keys: (N, d) projections by the momentum encoder, one array per view.
        queue: (K, d) normalised keys of earlier batches.
    """
    terms = []
    for view in (0, 1) if symmetric else (0,):
        q = unit(project("mocov2", weights, views[view], groups))
        positive = (q * unit(keys[1 - view])).sum(1, keepdims=True)
        logits = np.concatenate([positive, q @ queue.T], axis=1) / temperature
        terms.append(cross_entropy(logits, np.zeros(len(q), dtype=np.int64)))
    return float(np.mean(terms))


def byol(weights: Weights, views: Sequence[Array], *, targets: Sequence[Array]) -> float:
    """Return the squared distance of normalised predictions and targets, summed over both views."""
    terms = []
    for view in (0, 1):
        p = predict(weights, project("byol", weights, views[view]))
        terms.append(((unit(p) - unit(targets[1 - view])) ** 2).sum(1).mean())
    return float(np.sum(terms))


def sinkhorn(scores: Array, *, epsilon: float, rounds: int) -> Array:
    """Return (B, K) codes, each row a distribution, for (B, K) scores.

    Q is K x B. Each round scales its rows to sum to 1 / K, then its columns to sum to 1 / B.
    """
    images, prototypes = scores.shape
    q: Array = np.exp(scores.T / epsilon)
    for _ in range(rounds):
        for k in range(prototypes):
            q[k] /= q[k].sum() * prototypes
        for b in range(images):
            q[:, b] /= q[:, b].sum() * images
    balanced: Array = q.T * images
    return balanced


def scores(weights: Weights, rows: Array) -> Array:
    """Return the (B, K) cosines between rows and prototypes."""
    cosines: Array = unit(rows) @ unit(weights["prototypes.weight"]).T
    return cosines


def codes(
    weights: Weights,
    views: Sequence[Array],
    *,
    epsilon: float,
    rounds: int,
    queues: Sequence[Array] = (),
) -> list[Array]:
    """Return the codes of the first two views, balanced over the batch and each view's queue."""
    view_codes = []
    for view in (0, 1):
        z = project("swav", weights, views[view])
        rows = np.concatenate([z, queues[view]]) if queues else z
        view_codes.append(sinkhorn(scores(weights, rows), epsilon=epsilon, rounds=rounds)[: len(z)])
    return view_codes


def swav(
    weights: Weights, views: Sequence[Array], *, temperature: float, of: Sequence[Array]
) -> float:
    """Return the swapped prediction loss: the codes of two views, predicted from all others."""
    terms = []
    for code, view in permutations(range(len(views)), 2):
        if code < 2:
            p = predict(weights, project("swav", weights, views[view]))
            logs = log_softmax(scores(weights, p) / temperature)
            terms.append(-(of[code] * logs).sum(1).mean())
    return float(np.mean(terms))


def momentum_at(base: float, step: int, steps: int) -> float:
    """Return BYOL's momentum at a step: it increases to 1 along a cosine."""
    return 1 - (1 - base) * (math.cos(math.pi * step / steps) + 1) / 2
