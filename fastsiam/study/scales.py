"""Scales of the studies: a base recipe, a data set, and an accuracy measure for each.

``scales.toml`` lists them; docs/study.md describes the recipes of the related methods.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import Settings, merge
from fastsiam.config.study import ScaleName
from fastsiam.study.catalogue import VARIANTS, Changes

Measure = Literal["kNN top-1", "linear top-1"]

_LOG_LINES = 25
"""Approximate number of metrics lines that a run logs."""
_SAVES = 20
"""Number of checkpoints that a long run saves, so that a killed run repeats at most 1/20."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A base recipe, which the variants modify, with its data set and accuracy measure."""

    name: ScaleName
    title: str
    """Description of the network and the images, for tables and messages."""
    recipe: str
    """Name of the recipe that the base is derived from."""
    base: TrainConfig
    images: int
    """Expected number of training images."""
    classes: int
    measure: Measure
    cached: bool = False
    """Whether linear evaluation uses features computed once, without augmentation (--cached)."""
    seeds: int = 3
    """Default number of seeds per row."""
    methods: Mapping[str, Changes] = field(default_factory=dict)
    """Settings of each related method that override ``_METHODS``, or its "recipe" by name."""

    @property
    def chance(self) -> float:
        """Top-1 accuracy of random guessing, in percent."""
        return 100 / self.classes

    def on(self, data: str, *, gpus: int, device: Literal["auto", "cuda", "cpu"]) -> Scale:
        """Return a copy of the scale for the user's data and devices."""
        data_config = replace(self.base.data, data=data)
        run = replace(self.base.run, gpus=gpus, device=device)
        return replace(self, base=replace(self.base, data=data_config, run=run))

    def base_of(self, variant: str) -> TrainConfig:
        """Return the recipe that a variant modifies: the scale's, adapted to the method."""
        method = VARIANTS[variant].get("method", "")
        changes = {**_METHODS.get(method, {}), **self.methods.get(method, {})}
        if "recipe" in changes:
            return _with_recipe(self.base, changes["recipe"])
        if "frozen_epochs" in changes:
            changes["frozen_epochs"] = min(changes["frozen_epochs"], self.base.optim.epochs / 10)
        return _with_changes(self.base, changes)

    def recipe_of(self, variant: str) -> TrainConfig:
        """Return a variant's recipe: ``base_of`` with the variant's changes."""
        return _with_changes(self.base_of(variant), VARIANTS[variant])

    def shared_variant(self, variant: str) -> str:
        """Return the first variant with the same recipe, whose runs ``variant`` uses too."""
        if VARIANTS[variant].get("method") != "simsiam":
            return variant  # only the rows of SimSiam among other methods repeat another variant
        recipe = self.recipe_of(variant)
        of_simsiam = (x for x in VARIANTS if VARIANTS[x].get("method", "simsiam") == "simsiam")
        return next(name for name in of_simsiam if self.recipe_of(name) == recipe)

    def settings(self, variant: str) -> TrainConfig:
        """Return the settings of a variant's run, except for the seed: recipe, logging, saving."""
        config = self.recipe_of(variant)
        per_epoch = max(1, self.images // config.optim.batch)
        total = config.optim.epochs * per_epoch
        return replace(
            config,
            run=replace(
                config.run,
                tracker="none",
                log_every=max(1, total // _LOG_LINES),
                save_every=min(1000, max(per_epoch, total // _SAVES)),
            ),
        )


def _with_changes(recipe: TrainConfig, changes: Changes) -> TrainConfig:
    """Apply changes to a recipe. A changed method starts from that method's own defaults."""
    flags = recipe.to_flags()
    changed_flags = {flag: _value(flag, value, flags) for flag, value in changes.items()}
    return TrainConfig.from_flags(merge(Settings(flags=flags), Settings(flags=changed_flags)).flags)


def _value(flag: str, value: Any, flags: Mapping[str, Any]) -> Any:
    """Resolve a value: ``1/4 x dim`` is a quarter of the recipe's dim.

    A multiple of ``encoder_momentum`` scales its distance from 1.
    """
    factor, separator, base_flag = str(value).partition(" x")
    if not separator:
        return value
    base, share = flags[base_flag.strip() or flag], Fraction(factor)
    if flag == "encoder_momentum":
        return round(1 - (1 - base) * float(share), 6)
    product = base * share.numerator / share.denominator
    if isinstance(flags[flag], float):
        return round(product, 6 if flag == "lr" else 12)
    return round(product)


def _with_recipe(base: TrainConfig, name: str) -> TrainConfig:
    """Return a recipe with the base's data and epochs; warm-up is scaled in proportion."""
    recipe, epochs = RECIPES[name](), base.optim.epochs
    warmup = recipe.optim.warmup_epochs * epochs / recipe.optim.epochs
    optim = replace(recipe.optim, epochs=epochs, warmup_epochs=warmup)
    return replace(recipe, optim=optim, monitor=base.monitor, data=base.data, run=base.run)


_DATA = tomllib.loads(Path(__file__).with_name("scales.toml").read_text())
_METHODS: dict[str, dict[str, Any]] = _DATA["methods"]


def scale(name: ScaleName, *, epochs: int = 0) -> Scale:
    """Return a scale by name, with its base recipe trained for ``epochs`` (0: the default)."""
    attributes = dict(_DATA["scales"][name])
    settings = attributes.pop("settings", {}) | ({"epochs": epochs} if epochs else {})
    base = _with_changes(RECIPES[attributes["recipe"]](), settings)
    return Scale(name=name, base=base, **attributes)
