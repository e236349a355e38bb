"""SimSiam and its variants from the paper's formulas in float64 numpy, without fastsiam code.

Sources: section 3 and algorithm 1 for the network and the loss, Table 3 for BN, section 4.5 for
the cross-entropy, section 5.2 and its footnote for the moving average. The backbone is linear.
``related_formulas`` contains the methods of section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]
Pairs = Sequence[tuple[int, tuple[int, ...]]]
"""Each predicting view, and the views whose mean projection is its target."""

TABLE_3 = {
    "none": (False, False, False, False),
    "hidden": (True, False, True, False),
    "default": (True, True, True, False),
    "all": (True, True, True, True),
}
"""BN on the projector's hidden layer and output, and on the predictor's hidden layer and output."""


def features(weights: Weights, images: Array) -> Array:
    """Return (N, 5) features of (N, 3, S, S) images: 2 x 2 pooling, linear map, optional BN."""
    n, channels, side, _ = images.shape
    quarters = images.reshape(n, channels, 2, side // 2, 2, side // 2).mean((3, 5))
    x: Array = quarters.reshape(n, -1) @ weights["backbone.layer.weight"].T
    x = x + weights["backbone.layer.bias"]
    return _normalised(weights, x, "backbone.norm") if "backbone.norm.weight" in weights else x


def mlp(weights: Weights, x: Array, head: str, normed: Sequence[bool]) -> Array:
    """Apply an MLP head, with ReLU between its layers and BN after the layers in ``normed``."""
    for i, norm in enumerate(normed):
        x = np.maximum(x, 0) if i else x
        x = _layer(weights, x, f"{head}.{3 * i}", f"{head}.{3 * i + 1}", normed=norm)
    return x


def encode(weights: Weights, images: Array, *, norm: str) -> Array:
    """Return the projections z = f(x), (N, d), of a backbone and a two-layer projector."""
    return mlp(weights, features(weights, images), "projector", TABLE_3[norm][:2])


def predict(weights: Weights, z: Array, *, norm: str = "default") -> Array:
    """Return the predictions p = h(z), (N, d). Without predictor weights h is the identity."""
    if "predictor.0.weight" not in weights:
        return z
    return mlp(weights, z, "predictor", TABLE_3[norm][2:])


def _layer(weights: Weights, x: Array, linear: str, norm: str, *, normed: bool) -> Array:
    """Apply a linear layer, with a bias if it has one, and BN if ``normed``."""
    x = x @ weights[f"{linear}.weight"].T
    if f"{linear}.bias" in weights:
        x = x + weights[f"{linear}.bias"]
    return _normalised(weights, x, norm) if normed else x


def _normalised(weights: Weights, x: Array, norm: str) -> Array:
    """Apply BN, with scale and offset if it has them."""
    x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    if f"{norm}.weight" in weights:
        x = x * weights[f"{norm}.weight"] + weights[f"{norm}.bias"]
    return x


def unit(x: Array) -> Array:
    lengths: Array = np.sqrt((x * x).sum(1, keepdims=True))
    return x / lengths


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(1, keepdims=True))
    total: Array = e.sum(1, keepdims=True)
    return e / total


DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda p, z: -(unit(p) * unit(z)).sum(1),
    "cross-entropy": lambda p, z: -(softmax(z) * np.log(softmax(p))).sum(1),
}


def targets(zs: Mapping[int, Array], pairs: Pairs) -> list[Array]:
    """Return the target of each predicting view: the mean projection of the views it predicts."""
    return [sum((zs[view] for view in of), np.zeros(1)) / len(of) for _, of in pairs]


def update_averages(rows: Array, zs: Sequence[Array], momentum: float) -> Array:
    """Return updated moving averages of the images' l2-normalised projections over some views.

    The first average of an image is its projection.
    """
    now: Array = np.mean([unit(z) for z in zs], axis=0)
    return np.where(rows.any(axis=1, keepdims=True), momentum * rows + (1 - momentum) * now, now)


def loss(
    weights: Weights,
    views: Sequence[Array],
    pairs: Pairs,
    *,
    norm: str = "default",
    similarity: str = "cosine",
    against: Sequence[Array] | None = None,
) -> float:
    """Return the loss with the constant targets ``against``; None: without the stop-gradient."""
    zs = {view: encode(weights, x, norm=norm) for view, x in enumerate(views)}
    of = targets(zs, pairs) if against is None else against
    terms = [
        DISTANCES[similarity](predict(weights, zs[view], norm=norm), target).mean()
        for (view, _), target in zip(pairs, of, strict=True)
    ]
    return float(np.mean(terms))


def gradient(function: Callable[[Weights], float], weights: Weights) -> dict[str, Array]:
    """Return the numerical gradient by central differences, accurate to about 1e-9."""
    by = 1e-6
    gradients = {}
    for name, value in weights.items():
        slopes = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                changed = value.copy()
                changed[place] += sign * by
                ends.append(function({**weights, name: changed}))
            slopes[place] = (ends[0] - ends[1]) / (2 * by)
        gradients[name] = slopes
    return gradients
