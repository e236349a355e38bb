"""SimSiam and its variants from the paper's formulas in float64, without fastsiam code.

Sources: section 3 and algorithm 1 for the network and the loss, Table 3 for BN, section 4.5 for
the cross-entropy, section 5.2 and its footnote for the moving average. The backbone is linear.
``related_formulas`` contains the methods of section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
Pairs = Sequence[tuple[int, tuple[int, ...]]]
"""Each predicting view, and the views whose mean projection is its target."""

TABLE_3 = {
    "none": (False, False, False, False),
    "hidden": (True, False, True, False),
    "default": (True, True, True, False),
    "all": (True, True, True, True),
}
"""BN on the projector's hidden layer and output, and on the predictor's hidden layer and output."""


def features(weights: Weights, images: Tensor) -> Tensor:
    """Return (N, 5) features of (N, 3, S, S) images: 2 x 2 pooling, linear map, optional BN."""
    x = F.avg_pool2d(images, images.shape[-1] // 2).flatten(1)
    x = F.linear(x, weights["backbone.layer.weight"], weights["backbone.layer.bias"])
    return _normalised(weights, x, "backbone.norm") if "backbone.norm.weight" in weights else x


def mlp(weights: Weights, x: Tensor, head: str, normed: Sequence[bool]) -> Tensor:
    """Apply an MLP head, with ReLU between its layers and BN after the layers in ``normed``."""
    for i, norm in enumerate(normed):
        x = x.relu() if i else x
        x = F.linear(x, weights[f"{head}.{3 * i}.weight"], weights.get(f"{head}.{3 * i}.bias"))
        x = _normalised(weights, x, f"{head}.{3 * i + 1}") if norm else x
    return x


def encode(weights: Weights, images: Tensor, *, norm: str) -> Tensor:
    """Return the projections z = f(x), (N, d), of a backbone and a two-layer projector."""
    return mlp(weights, features(weights, images), "projector", TABLE_3[norm][:2])


def predict(weights: Weights, z: Tensor, *, norm: str = "default") -> Tensor:
    """Return the predictions p = h(z), (N, d). Without predictor weights h is the identity."""
    if "predictor.0.weight" not in weights:
        return z
    return mlp(weights, z, "predictor", TABLE_3[norm][2:])


def _normalised(weights: Weights, x: Tensor, norm: str) -> Tensor:
    """Apply BN, with scale and offset if it has them."""
    affine = weights.get(f"{norm}.weight"), weights.get(f"{norm}.bias")
    return F.batch_norm(x, None, None, *affine, training=True)


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(1, keepdim=True).sqrt()


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda p, z: -(unit(p) * unit(z)).sum(1),
    "cross-entropy": lambda p, z: -(z.softmax(1) * p.log_softmax(1)).sum(1),
}


def targets(zs: Mapping[int, Tensor], pairs: Pairs) -> list[Tensor]:
    """Return the target of each predicting view: the mean projection of the views it predicts."""
    return [torch.stack([zs[view] for view in of]).mean(0) for _, of in pairs]


def update_averages(rows: Tensor, zs: Sequence[Tensor], momentum: float) -> Tensor:
    """Return updated moving averages of the images' l2-normalised projections over some views.

    The first average of an image is its projection.
    """
    now = torch.stack([unit(z) for z in zs]).mean(0)
    return torch.where(rows.any(1, keepdim=True), momentum * rows + (1 - momentum) * now, now)


def loss(
    weights: Weights,
    views: Sequence[Tensor],
    pairs: Pairs,
    *,
    norm: str = "default",
    similarity: str = "cosine",
    against: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the loss with the constant targets ``against``; None: without the stop-gradient."""
    zs = {view: encode(weights, x, norm=norm) for view, x in enumerate(views)}
    of = targets(zs, pairs) if against is None else against
    terms = [
        DISTANCES[similarity](predict(weights, zs[view], norm=norm), target).mean()
        for (view, _), target in zip(pairs, of, strict=True)
    ]
    return torch.stack(terms).mean()
