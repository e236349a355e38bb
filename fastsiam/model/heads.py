"""Projection and prediction MLPs; SimSiam's follow section 3 of its paper.

Weights are initialised by PyTorch's defaults. A layer without BN has a bias, and an identity
instead of the BN, so that weights have the same names in all variants: layer i is module 3 i.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fastsiam.config import HeadNorm


def mlp(
    *widths: int, hidden_bn: bool = True, output_bn: bool = False, output_affine: bool = True
) -> nn.Sequential:
    """Build fully connected layers with ReLUs between: (N, first width) to (N, last width).

    Args:
        widths: of the input, the hidden layers and the output.
        hidden_bn: whether hidden layers have BN.
        output_bn: whether the output has BN.
        output_affine: whether that BN has a scale and an offset.
    """
    modules: list[nn.Module] = []
    for width, to in pairwise(widths[:-1]):
        norm = nn.BatchNorm1d(to) if hidden_bn else nn.Identity()
        modules += [nn.Linear(width, to, bias=not hidden_bn), norm, nn.ReLU(inplace=True)]
    modules.append(nn.Linear(widths[-2], widths[-1], bias=not output_bn))
    if output_bn:
        modules.append(nn.BatchNorm1d(widths[-1], affine=output_affine))
    return nn.Sequential(*modules)


def projector(
    features: int,
    dim: int,
    *,
    layers: int,
    hidden: int = 0,
    norm: HeadNorm = "default",
    affine: bool = False,
) -> nn.Sequential:
    """Build SimSiam's projection MLP: (N, features) to (N, dim).

    "BN applied to each fully-connected layer, including its output fc. Its output fc has no ReLU":
    the output BN has no affine parameters, as in the authors' code, unless ``affine``.

    Args:
        features: of the backbone.
        dim: of the output.
        layers: number of fully connected layers.
        hidden: width of hidden layers; 0 means ``dim``.
        norm: which layers have BN (Table 3).
        affine: whether the output's BN has a scale and an offset.
    """
    return mlp(
        features,
        *[hidden or dim] * (layers - 1),
        dim,
        hidden_bn=norm != "none",
        output_bn=norm in ("default", "all"),
        output_affine=affine,
    )


def predictor(dim: int, hidden: int, *, norm: HeadNorm = "default") -> nn.Sequential:
    """Build SimSiam's prediction MLP: (N, dim) to (N, dim) through a bottleneck.

    "BN applied to its hidden fc layers. Its output fc does not have BN or ReLU"; the output has a
    bias.
    """
    return mlp(dim, hidden, dim, hidden_bn=norm != "none", output_bn=norm == "all")
