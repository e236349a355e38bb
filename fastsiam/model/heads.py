"""Projection and prediction MLPs.

Weights have PyTorch's default initialisation. A layer without BN has a bias, and ``nn.Identity`` in
place of BN, so that state dict keys are the same in all variants: layer i is module 3 i.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(
    *widths: int, hidden_bn: bool = True, output_bn: bool = False, output_affine: bool = True
) -> nn.Sequential:
    """Build fully connected layers with ReLUs between: (N, first width) to (N, last width).

    Args:
        widths: widths of the input, the hidden layers and the output.
        hidden_bn: whether hidden layers have BN.
        output_bn: whether the output has BN.
        output_affine: whether the output's BN has a scale and an offset.
    """
    modules: list[nn.Module] = []
    for width, next_width in pairwise(widths[:-1]):
        norm = nn.BatchNorm1d(next_width) if hidden_bn else nn.Identity()
        modules += [nn.Linear(width, next_width, bias=not hidden_bn), norm, nn.ReLU(inplace=True)]
    modules.append(nn.Linear(widths[-2], widths[-1], bias=not output_bn))
    if output_bn:
        modules.append(nn.BatchNorm1d(widths[-1], affine=output_affine))
    return nn.Sequential(*modules)
