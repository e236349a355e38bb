"""The related methods at each scale: what turns a scale's base recipe into theirs.

At the scales ``paper`` and ``cifar`` they are the methods' own recipes, as long as the base. At the
small ones a method has the base's network, views and epochs; heads, loss and rate are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fastsiam.config import (
    BYOLConfig,
    MethodConfig,
    MoCoV2Config,
    SimCLRConfig,
    SwAVConfig,
    TrainConfig,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.study.variants import Change

RELATED = ("simclr", "mocov2", "byol", "swav")
"""The methods that the paper compares SimSiam with (Table 4), by their names."""

_MOCO_GROUP = 32
"""Images that share BN statistics: 256 on 8 GPUs were MoCo's."""


def with_recipes(names: Mapping[str, str]) -> dict[str, Change]:
    """Return what turns a base into each method's own recipe.

    Args:
        names: of the recipes, by their methods.
    """
    return {method: _recipe(name) for method, name in names.items()}


def small(rates: Mapping[str, float], *, queue: int) -> dict[str, Change]:
    """Return what turns a small base into each method's recipe.

    Args:
        rates: base rates (for a batch of 256) of the methods.
        queue: MoCo's, in projections; every image adds two in an epoch.
    """
    return {method: _small(method, rate, queue) for method, rate in rates.items()}


def _recipe(name: str) -> Change:
    """Return a change to a recipe: all of it, but as long as the base; warm-up is in proportion."""

    def change(base: TrainConfig) -> TrainConfig:
        own = RECIPES[name]()
        epochs = base.optim.epochs
        warmup = own.optim.warmup_epochs * epochs / own.optim.epochs
        return replace(
            own,
            optim=replace(own.optim, epochs=epochs, warmup_epochs=warmup),
            monitor=base.monitor,
        )

    return change


def _small(method: str, rate: float, queue: int) -> Change:
    def change(base: TrainConfig) -> TrainConfig:
        numerics = base.numerics
        if method == "mocov2":
            numerics = replace(numerics, sync_bn=False, bn_images=_MOCO_GROUP)
        return replace(
            base,
            model=replace(base.model, method=_HEADS[method](base, queue)),
            optim=replace(base.optim, lr=rate),
            numerics=numerics,
        )

    return change


def _simclr(base: TrainConfig, _: int) -> MethodConfig:
    """Its paper's temperature for CIFAR-10 (appendix B.9)."""
    return SimCLRConfig(
        projector_layers=2, dim=128, projector_dim=512, predictor_dim=128, temperature=0.5
    )


def _mocov2(base: TrainConfig, queue: int) -> MethodConfig:
    """Temperature and momentum of its authors' CIFAR-10 demo, whose runs are short, too."""
    return MoCoV2Config(
        dim=128, projector_dim=512, temperature=0.1, queue=queue, encoder_momentum=0.99
    )


def _byol(base: TrainConfig, _: int) -> MethodConfig:
    """At momentum .97 the target is 33 steps behind; at .99 it would be a fifth of the run."""
    return BYOLConfig(dim=256, projector_dim=512, predictor_dim=512, encoder_momentum=0.97)


def _swav(base: TrainConfig, _: int) -> MethodConfig:
    """As many prototypes as a batch can be spread over, frozen for a tenth of the run at most."""
    return SwAVConfig(
        projector_layers=2,
        dim=128,
        projector_dim=512,
        predictor_dim=128,
        prototypes=100,
        frozen_epochs=min(1.0, base.optim.epochs / 10),
    )


_HEADS: dict[str, Callable[[TrainConfig, int], MethodConfig]] = {
    "simclr": _simclr,
    "mocov2": _mocov2,
    "byol": _byol,
    "swav": _swav,
}
