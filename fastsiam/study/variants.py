"""Changes of a scale's recipe of a method: each variant that a study has is one.

What depends on the size of a recipe is relative to the base: a batch is an eighth to eight times
its batch, as the paper's 64 to 4096 are of 512.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastsiam.config import TrainConfig

Change = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True, slots=True)
class Variant:
    """One change of a method's base recipe, and the name of its runs' folders."""

    name: str
    title: str
    change: Change
    method: str = ""
    """Whose base recipe is changed, as ``Scale.methods`` names it; empty: the scale's own."""


def unchanged(base: TrainConfig) -> TrainConfig:
    """Leave the base recipe as it is."""
    return base


def of_method(**changes: Any) -> Change:
    """Return a change of the method's settings."""
    return lambda base: _with_method(base, **changes)


def times_batch(factor: float) -> Change:
    """Return a change of the batch; from twice the base up with 10 of 100 epochs of warm-up."""

    def change(base: TrainConfig) -> TrainConfig:
        warmup = base.optim.epochs / 10 if factor >= 2 else base.optim.warmup_epochs
        return _with_optim(base, batch=round(base.optim.batch * factor), warmup_epochs=warmup)

    return change


def times_epochs(factor: int, *, batch: float = 1) -> Change:
    """Return a change of the length, and of the batch."""

    def change(base: TrainConfig) -> TrainConfig:
        size = round(base.optim.batch * batch)
        return _with_optim(base, epochs=base.optim.epochs * factor, batch=size)

    return change


def byol_times_epochs(factor: int) -> Change:
    """Return a change of BYOL's length, and of what depends on it.

    The paper's runs of 200 and 400 epochs, and of 800, follow BYOL's recipes for 300 and 1000: a
    rate of .3 and .2 to .45 for 100 epochs, decay of 1e-6 and 1.5e-6 to 1e-6, momentum of .99 and
    .996 to .99 (section 6.1).
    """
    rate, decay, left = (4 / 9, 1.5, 0.4) if factor >= 8 else (2 / 3, 1.0, 1.0)

    def change(base: TrainConfig) -> TrainConfig:
        method: Any = base.model.method
        momentum = round(1 - (1 - method.encoder_momentum) * left, 6)
        return _with_optim(
            _with_method(base, encoder_momentum=momentum),
            epochs=base.optim.epochs * factor,
            lr=round(base.optim.lr * rate, 6),
            weight_decay=float(f"{base.optim.weight_decay * decay:.6g}"),
        )

    return change


def without_head_bn(base: TrainConfig) -> TrainConfig:
    """Take BN from the heads, with 10 of 100 epochs of warm-up (Table 3a)."""
    return _with_optim(_with_method(base, head_bn="none"), warmup_epochs=base.optim.epochs / 10)


def part_of_dim(part: int) -> Change:
    """Return a change of the output's dimension; the projector's hidden layers stay as wide."""

    def change(base: TrainConfig) -> TrainConfig:
        method: Any = base.model.method
        dim, hidden = method.dim // part, method.projector_dim or method.dim
        return _with_method(base, dim=dim, predictor_dim=dim // 4, projector_dim=hidden)

    return change


def wide_predictor(base: TrainConfig) -> TrainConfig:
    """Make the predictor's hidden layer as wide as its output."""
    method: Any = base.model.method
    return _with_method(base, predictor_dim=method.dim)


def two_pairs(base: TrainConfig) -> TrainConfig:
    """Take two pairs of views of each image, and predict from the first of each."""
    asymmetric = _with_method(base, symmetric=False)
    return replace(asymmetric, augment=replace(base.augment, views=base.augment.views * 2))


def transfer(base: TrainConfig) -> TrainConfig:
    """Ten times the rate and a tenth of the decay: .5 and 1e-5 of the paper's .05 and 1e-4."""
    longer = times_epochs(2)(base)
    return _with_optim(longer, lr=base.optim.lr * 10, weight_decay=base.optim.weight_decay / 10)


def _with_method(config: TrainConfig, **changes: Any) -> TrainConfig:
    method = replace(config.model.method, **changes)
    return replace(config, model=replace(config.model, method=method))


def _with_optim(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, optim=replace(config.optim, **changes))
