"""Projection and prediction heads as sequences of layers, described by names and shapes alone."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp

HEADS = ("projector", "predictor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Fully connected layers with ReLUs between."""

    widths: tuple[int, ...]
    """Outputs of each layer."""
    hidden_bn: bool
    output_bn: bool
    output_affine: bool = False
    """Whether the output's BN has a scale and an offset."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], part: str) -> Head:
        """Describe a head of at least one layer by its weights."""
        layers = _layers(weights, part)
        norms = [f"{part}.{number + 1}." for number in layers]
        normed = [any(key.startswith(norm) for key in weights) for norm in norms]
        return cls(
            widths=tuple(map(len, layers.values())),
            hidden_bn=any(normed[:-1]),
            output_bn=normed[-1],
            output_affine=f"{norms[-1]}weight" in weights,
        )

    def build(self, features: int) -> nn.Sequential:
        """Build it on features (N, features)."""
        return mlp(
            features,
            *self.widths,
            hidden_bn=self.hidden_bn,
            output_bn=self.output_bn,
            output_affine=self.output_affine,
        )


def build_parts(backbone: Backbone, weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Put the heads that weights are of behind a backbone, with new weights."""
    parts: dict[str, nn.Module] = {"backbone": backbone}
    width = backbone.features
    for part in HEADS:
        if layers := _layers(weights, part):
            if part == "predictor" and "projector" not in parts:
                width = next(iter(layers.values())).shape[1]
            head = Head.of(weights, part)
            parts[part], width = head.build(width), head.widths[-1]
    prototypes = weights.get("prototypes.weight")
    if prototypes is not None and prototypes.dim() == 2:
        parts["prototypes"] = nn.Linear(width, len(prototypes), bias=False)
    return nn.Sequential(OrderedDict(parts))


def numbered(names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, str]:
    """Number the layers of heads as fastsiam does: layer i is at 3i, its BN at 3i + 1.

    Programs that have no BN at a place leave its number out, too. A head that is built in another
    way keeps its numbers, and does not fit then.

    Args:
        names: fastsiam's name of each key.
        state: the file's weights.
    """
    weights = {name: state[key] for key, name in names.items()}
    new = {part: _by_threes(weights, part) for part in HEADS}

    def renamed(name: str) -> str:
        part, number, rest = _split(name)
        own = new[part].get(number) if part else None
        return name if own is None else f"{part}.{own}.{rest}"

    return {key: renamed(name) for key, name in names.items()}


def fold_biases(weights: dict[str, Tensor]) -> None:
    """Take each bias before a BN out of the BN's running mean instead: the same in eval mode."""
    for key in list(weights):
        part, number, rest = _split(key)
        mean = f"{part}.{number + 1}.running_mean"
        if rest == "bias" and mean in weights and weights[mean].shape == weights[key].shape:
            weights[mean] = weights[mean].float() - weights.pop(key).float()


def _split(name: str) -> tuple[str, int, str]:
    """Split a weight's name into head, number and the rest; the head is "" for other parts."""
    match = re.match(rf"({'|'.join(HEADS)})\.(\d+)\.", name)
    return (match[1], int(match[2]), name[match.end() :]) if match else ("", 0, "")


def _layers(weights: Mapping[str, Tensor], part: str) -> dict[int, Tensor]:
    """Return the matrices of a head by their numbers, in order."""
    split = {key: _split(key) for key, value in weights.items() if value.dim() == 2}
    layers = {
        n: weights[key] for key, (own, n, rest) in split.items() if (own, rest) == (part, "weight")
    }
    return dict(sorted(layers.items()))


def _by_threes(weights: Mapping[str, Tensor], part: str) -> dict[int, int]:
    """Return the new number of each of a head's; {} if it has others than layers and their BN."""
    every = sorted({number for own, number, _ in map(_split, weights) if own == part})
    starts = [*_layers(weights, part), max(every, default=0) + 1]
    new: dict[int, int] = {}
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        own = [number for number in every if start <= number < end]
        new |= dict(zip(own, (3 * i, 3 * i + 1), strict=False))
    return new if len(new) == len(every) else {}
