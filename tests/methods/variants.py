"""The method variants that tests cover, and for SimSiam which views predict which."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastsiam.config import (
    AugmentConfig,
    MethodConfig,
    SimSiamConfig,
    TrainConfig,
)
from fastsiam.config.methods.byol import BYOLConfig
from fastsiam.config.methods.fastsiam import FastSiamConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.simclr import SimCLRConfig
from fastsiam.config.methods.swav import SwAVConfig
from tests.configs import with_settings

SYMMETRIC = ((0, (1,)), (1, (0,)))
FIRST = ((0, (1,)),)
TWICE = ((0, (1,)), (2, (3,)))
THREE = ((0, (1, 2)), (1, (0, 2)), (2, (0, 1)))
FOUR = ((0, (1, 2, 3)), (1, (0, 2, 3)), (2, (0, 1, 3)), (3, (0, 1, 2)))


SMALL = {"projector_layers": 2, "dim": 16, "projector_dim": 16, "predictor_dim": 4}


@dataclass(frozen=True)
class Case:
    """A method with some of its settings, by name."""

    settings: dict[str, Any] = field(default_factory=dict)
    method: type[MethodConfig] = SimSiamConfig
    smaller: tuple[int, ...] = (1, 1)
    """For each view, the factor by which its side is smaller than the first view's."""
    run: dict[str, Any] = field(default_factory=dict)
    """Additional run settings, by flag name."""

    def config(self, **small: Any) -> Any:
        """Return the method's config, with those sizes from ``small`` that the method has."""
        names = {f.name for f in fields(self.method)}
        sizes = {name: value for name, value in small.items() if name in names}
        return self.method(**sizes | self.settings)

    def applied(self, config: TrainConfig, **settings: Any) -> TrainConfig:
        """Return the run's config with this method and small heads."""
        first = config.augment.views[0]
        views = tuple(replace(first, crop=first.crop // by) for by in self.smaller)
        model = replace(config.model, method=self.config(**SMALL))
        config = replace(config, augment=AugmentConfig(views=views), model=model)
        return with_settings(config, **self.run, **settings)


@dataclass(frozen=True)
class Variant(Case):
    """SimSiam or FastSiam, with each predicting view and the views that it predicts."""

    pairs: tuple[tuple[int, tuple[int, ...]], ...] = SYMMETRIC

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(sorted({view for _, targets in self.pairs for view in targets}))

    def __post_init__(self) -> None:
        views = 1 + max(view for first, targets in self.pairs for view in (first, *targets))
        object.__setattr__(self, "smaller", (1,) * views)


def _fast(pairs: Any, **settings: Any) -> Variant:
    return Variant(settings, FastSiamConfig, pairs=pairs)


VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "no stop-gradient": Variant({"stop_gradient": False}),
    "no predictor": Variant({"predictor": "none"}),
    "fixed predictor": Variant({"predictor": "fixed"}),
    "no BN": Variant({"head_bn": "none"}),
    "BN hidden": Variant({"head_bn": "hidden"}),
    "BN on all": Variant({"head_bn": "all"}),
    "affine": Variant({"output_affine": True}),
    "cross-entropy": Variant({"similarity": "cross-entropy"}),
    "cross-entropy, no stop-gradient": Variant(
        {"similarity": "cross-entropy", "stop_gradient": False}
    ),
    "asymmetric": Variant({"symmetric": False}, pairs=FIRST),
    "asymmetric 2x": Variant({"symmetric": False}, pairs=TWICE),
    "asymmetric 2x, no stop-gradient": Variant(
        {"symmetric": False, "stop_gradient": False}, pairs=TWICE
    ),
    "2 steps": Variant({"alternate_every": 2}),
    "an epoch": Variant({"alternate_every": 0}),
    "average": Variant({"target_average": 0.8, "predictor": "none"}),
    "average, predictor": Variant({"target_average": 0.5}),
    "average, asymmetric 2x": Variant({"target_average": 0.8, "symmetric": False}, pairs=TWICE),
    "average, 2 steps, asymmetric 2x": Variant(
        {"target_average": 0.8, "alternate_every": 2, "symmetric": False}, pairs=TWICE
    ),
    "momentum encoder": Variant({"encoder_momentum": 0.9}),
    "fastsiam 3": _fast(THREE),
    "fastsiam 4": _fast(FOUR),
    "fastsiam 3, no stop-gradient": _fast(THREE, stop_gradient=False),
    "fastsiam 4, asymmetric": _fast(((0, (1, 2, 3)),), symmetric=False),
    "fastsiam 3, cross-entropy": _fast(THREE, similarity="cross-entropy"),
    "fastsiam 3, average": _fast(THREE, target_average=0.8, predictor="none"),
    "fastsiam 4, 2 steps": _fast(FOUR, alternate_every=2),
}


def _swav(smaller: tuple[int, ...] = (1, 1), **settings: Any) -> Case:
    return Case({"prototypes": 8, **settings}, SwAVConfig, smaller)


def _mocov2(**settings: Any) -> Case:
    return Case({"queue": 20, "encoder_momentum": 0.9, **settings}, MoCoV2Config)


def _byol(**settings: Any) -> Case:
    return Case({"encoder_momentum": 0.9, **settings}, BYOLConfig)


RELATED: dict[str, Case] = {
    "simclr": Case({}, SimCLRConfig),
    "mocov2": _mocov2(),
    "byol": _byol(),
    "swav, queue": _swav(queue=12, queue_from=0.5),
    "swav": _swav(),
    "swav, multi-crop": _swav((1, 1, 2), frozen_epochs=0.5, queue=12, queue_from=0.5),
    "simclr, predictor": Case({"predictor": "trained", "projector_layers": 3}, SimCLRConfig),
    "simclr, predictor, stop-gradient": Case(
        {"predictor": "trained", "stop_gradient": True, "temperature": 0.5}, SimCLRConfig
    ),
    "mocov2, asymmetric": _mocov2(symmetric=False),
    "mocov2, more keys than its queue": _mocov2(queue=12, temperature=0.07),
    "mocov2, parts": replace(_mocov2(), run={"sync_bn": False, "bn_images": 4}),
    "byol, constant": _byol(momentum_schedule="constant"),
    "byol, no momentum": _byol(encoder_momentum=0.0, momentum_schedule="constant"),
    "swav, predictor": _swav(predictor="trained", sinkhorn_rounds=1, epsilon=0.1),
    "swav, no stop-gradient": _swav(stop_gradient=False, frozen_epochs=0.0),
    "swav, predictor, queue, no stop-gradient": _swav(
        predictor="trained", stop_gradient=False, queue=8, queue_from=0.0, projector_layers=3
    ),
}
"""The methods of the paper's section 6 and their variants."""

ALL_CASES: dict[str, Case] = {**VARIANTS, **RELATED}
