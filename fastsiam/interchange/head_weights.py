"""Projection and prediction heads, reconstructed from the names and shapes of their weights."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp

HEADS = ("projector", "predictor")


@dataclass(frozen=True, slots=True)
class Head:
    """The architecture of an MLP head: linear layers with ReLUs in between."""

    widths: tuple[int, ...]
    """Output width of each layer."""
    norms: dict[str, bool]
    """Which layers have BN, as keyword arguments of ``mlp``."""

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], part: str) -> Head:
        """Infer a head's architecture from its weights, which must have at least one layer."""
        layers = layers_of(weights, part)
        norms = [f"{part}.{number + 1}." for number in layers]
        hidden = any(key.startswith(tuple(norms[:-1])) for key in weights)
        output = any(key.startswith(norms[-1]) for key in weights)
        affine = f"{norms[-1]}weight" in weights
        return cls(
            tuple(map(len, layers.values())),
            {"hidden_bn": hidden, "output_bn": output, "output_affine": affine},
        )


def build_parts(backbone: Backbone, weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Attach the heads that a state dict has weights for to a backbone, randomly initialised."""
    parts: dict[str, nn.Module] = {"backbone": backbone}
    width = backbone.features
    for part in HEADS:
        if layers := layers_of(weights, part):
            if part == "predictor" and "projector" not in parts:
                width = next(iter(layers.values())).shape[1]
            head = Head.of(weights, part)
            parts[part] = mlp(width, *head.widths, **head.norms)
            width = head.widths[-1]
    prototypes = weights.get("prototypes.weight")
    if prototypes is not None and prototypes.dim() == 2:
        parts["prototypes"] = nn.Linear(width, len(prototypes), bias=False)
    return nn.Sequential(OrderedDict(parts))


def renumber(names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, str]:
    """Renumber the layers of heads like fastsiam: layer i is at 3i, its BN at 3i + 1.

    Other programs do not reserve a number for a BN that is missing.

    Args:
        names: fastsiam's name for each key of the file, but with the file's layer numbers.
        state: the file's weights.
    """
    weights = {name: state[key] for key, name in names.items()}
    new_numbers: dict[str, dict[int, int]] = {part: {} for part in HEADS}
    for part, number in sorted({_split(name)[:2] for name in weights} - {("", 0)}):
        free = max(new_numbers[part].values(), default=-1) + 1
        new_numbers[part][number] = free + -free % 3 if number in layers_of(weights, part) else free

    def rename(name: str) -> str:
        part, number, rest = _split(name)
        return f"{part}.{new_numbers[part][number]}.{rest}" if part else name

    return {key: rename(name) for key, name in names.items()}


def fold_biases(weights: dict[str, Tensor]) -> None:
    """Fold each bias before a BN into its running mean, in place: same outputs in eval mode."""
    for key in list(weights):
        part, number, rest = _split(key)
        mean = f"{part}.{number + 1}.running_mean"
        if rest == "bias" and mean in weights and weights[mean].shape == weights[key].shape:
            weights[mean] = weights[mean].float() - weights.pop(key).float()


def _split(name: str) -> tuple[str, int, str]:
    """Split a weight's name into head, layer number and the rest; the head is "" in other parts."""
    match = re.match(rf"({'|'.join(HEADS)})\.(\d+)\.", name)
    return (match[1], int(match[2]), name[match.end() :]) if match else ("", 0, "")


def layers_of(weights: Mapping[str, Tensor], part: str) -> dict[int, Tensor]:
    """Return the weight matrices of a head by layer number, in order."""
    pattern = re.compile(rf"{part}\.(\d+)\.weight")
    matches = ((pattern.fullmatch(key), x) for key, x in weights.items() if x.dim() == 2)
    layers = {int(match[1]): x for match, x in matches if match}
    return dict(sorted(layers.items()))
