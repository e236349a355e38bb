"""The projection and prediction MLPs (section 3, "Baseline settings").

The initialisers are PyTorch's defaults.
"""

from __future__ import annotations

from torch import nn


def projector(features: int, dim: int, *, layers: int, hidden: int = 0) -> nn.Sequential:
    """Build the projection MLP: (N, features) to (N, dim); ``hidden`` wide between, 0 is ``dim``.

    "BN applied to each fully-connected layer, including its output fc. Its output fc has no ReLU":
    the output BN has no affine parameters, as in the authors' code. No fc has a bias, for BN takes
    it away again.
    """
    widths = [features] + [hidden or dim] * (layers - 1) + [dim]
    modules: list[nn.Module] = []
    for i in range(layers):
        last = i == layers - 1
        modules += [
            nn.Linear(widths[i], widths[i + 1], bias=False),
            nn.BatchNorm1d(widths[i + 1], affine=not last),
        ]
        if not last:
            modules.append(nn.ReLU(inplace=True))
    return nn.Sequential(*modules)


def predictor(dim: int, hidden: int) -> nn.Sequential:
    """Build the prediction MLP: (N, dim) to (N, dim) through a bottleneck.

    "BN applied to its hidden fc layers. Its output fc does not have BN or ReLU"; the output has a
    bias.
    """
    return nn.Sequential(
        nn.Linear(dim, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, dim),
    )
