"""Heads of other programs' files: their layers by our numbers, and which method they are of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fastsiam.config import (
    BYOLConfig,
    HeadNorm,
    MethodConfig,
    MoCoV2Config,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
)

PARTS = ("projector", "predictor")
"""The heads of which every layer has a number."""


def numbered(names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, str]:
    """Number the layers of heads as ours are: layer i is at 3i, its BN at 3i + 1.

    Programs that have no BN at a place leave its number out, too. A head that is built in another
    way keeps its numbers, and does not fit then.

    Args:
        names: our name of each key.
        state: the file's weights.
    """
    weights = {name: state[key] for key, name in names.items()}
    new = {part: _by_threes(weights, part) for part in PARTS}

    def renamed(name: str) -> str:
        found = re.match(r"(\w+)\.(\d+)\.", name)
        number = new.get(found[1], {}).get(int(found[2])) if found else None
        return (
            name
            if found is None or number is None
            else f"{found[1]}.{number}.{name[found.end() :]}"
        )

    return {key: renamed(name) for key, name in names.items()}


def linear(weights: Mapping[str, Tensor], part: str) -> list[str]:
    """Return the names of a head's matrices, in their order."""
    found = {
        int(m[1]): key
        for key, value in weights.items()
        if (m := re.match(rf"{part}\.(\d+)\.weight$", key)) and value.dim() == 2
    }
    return [found[number] for number in sorted(found)]


def fold_biases(weights: dict[str, Tensor]) -> None:
    """Take each bias before a BN out of the BN's running mean instead: the same in eval mode."""
    for key in list(weights):
        found = re.match(r"(projector|predictor)\.(\d+)\.bias$", key)
        mean = f"{found[1]}.{int(found[2]) + 1}.running_mean" if found else ""
        if mean in weights and weights[mean].shape == weights[key].shape:
            weights[mean] = weights[mean].float() - weights.pop(key).float()


def method_of(
    weights: Mapping[str, Tensor], *, method: str = "", momentum: bool = False
) -> tuple[MethodConfig, bool]:
    """Find out the method from its heads; return its settings, and whether the file tells it.

    Several methods have the same heads. Then it is the one that is usually meant, which the file
    does not tell: BN on all of the projector is SimCLR's, on its hidden layers BYOL's, on none
    MoCo's. What has a predictor is SimSiam's, but for BYOL's projection without BN. Heads that
    no method has are taken for SimSiam's, and do not fit then.

    Args:
        weights: by our names.
        method: the only one that the file's layout is of; empty where it is of several.
        momentum: whether a momentum encoder or its queue is in the file, too.

    Raises:
        ValueError: there is no method of such sizes.
    """
    project, predict = ([weights[key] for key in linear(weights, part)] for part in PARTS)
    norms, prototypes = _norms(weights), weights.get("prototypes.weight")
    if method == "simsiam" or not (project or predict):
        return _simsiam(project, predict, norms), method == "simsiam"
    normed = norms["head_bn"], norms["output_affine"]
    sizes: dict[str, Any] = {}
    if project:
        sizes = {"projector_layers": len(project), "dim": len(project[-1])}
    if len(project) > 1:
        sizes["projector_dim"] = len(project[0])
    bottleneck: dict[str, Any] = {"predictor_dim": len(predict[0])} if predict else {}
    if method == "swav" or prototypes is not None:
        sizes |= {} if prototypes is None else {"prototypes": len(prototypes)}
        sizes |= {"predictor": "trained"} if predict else {}
        return SwAVConfig(**sizes, **bottleneck), True
    if normed == ("hidden", False):
        return BYOLConfig(**sizes, **bottleneck), bool(predict) and momentum
    if predict:
        return _simsiam(project, predict, norms), not momentum
    if method == "mocov2" or normed == ("none", False):
        return MoCoV2Config(**sizes), method == "mocov2" or momentum
    if normed == ("default", True):
        return SimCLRConfig(**sizes), False
    return _simsiam(project, predict, norms), False


def _by_threes(weights: Mapping[str, Tensor], part: str) -> dict[int, int]:
    """Return our number of each of a head's; none if it has others than layers and their BN."""
    layers = [int(name.split(".")[1]) for name in linear(weights, part)]
    every = {int(m[1]) for name in weights if (m := re.match(rf"{part}\.(\d+)\.", name))}
    new: dict[int, int] = {}
    for i, (start, end) in enumerate(itertools.pairwise([*layers, max(every, default=0) + 1])):
        new |= dict(
            zip(sorted(x for x in every if start <= x < end), (3 * i, 3 * i + 1), strict=False)
        )
    return new if len(new) == len(every) else {}


def _simsiam(
    project: Sequence[Tensor], predict: Sequence[Tensor], norms: Mapping[str, Any]
) -> SimSiamConfig:
    heads: dict[str, Any] = {}
    if project:
        heads |= {"projector_layers": len(project), "dim": len(project[-1])}
        if len(project) > 1 and len(project[0]) != len(project[-1]):
            heads["projector_dim"] = len(project[0])
    if predict:
        heads |= {"predictor_dim": len(predict[0])}
        heads.setdefault("dim", len(predict[-1]))
    elif project:
        heads["predictor"] = "none"
    return SimSiamConfig(**heads, **norms)


def _norms(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the settings of the heads' BN, as far as weights tell; what they leave open is usual.

    Without the projector's output nobody can tell "hidden" from the default, without the
    predictor's "all". Layers that no setting has are the default's too, and do not fit then.
    """
    projector, predictor = (
        [f"{part}.{int(key.split('.')[1]) + 1}" for key in linear(weights, part)] for part in PARTS
    )
    normed = {name for name in (*projector, *predictor) if f"{name}.running_mean" in weights}
    hidden, outputs = {*projector[:-1], *predictor[:-1]}, {*projector[-1:], *predictor[-1:]}
    patterns: dict[HeadNorm, set[str]] = {
        "default": hidden | {*projector[-1:]},
        "none": set(),
        "hidden": hidden,
        "all": hidden | outputs,
    }
    norm = next((norm for norm, names in patterns.items() if names == normed), "default")
    affine = bool(projector) and projector[-1] in normed and f"{projector[-1]}.weight" in weights
    return {"head_bn": norm, "output_affine": affine}
