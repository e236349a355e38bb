"""Scales of the studies: a base recipe, a data set, and an accuracy measure for each.

``scales.toml`` lists them. At the scales ``paper`` and ``cifar``, the related methods use their own
recipes with the base recipe's number of epochs. At smaller scales, every method uses the base
recipe's network, views and epochs, with its own heads, loss and learning rate.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.study import ScaleName
from fastsiam.study.catalogue import VARIANTS, Changes, with_changes

Measure = Literal["kNN top-1", "linear top-1"]
Device = Literal["auto", "cuda", "cpu"]

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

    def on(self, data: str, *, gpus: int, device: Device) -> Scale:
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
        return with_changes(self.base, changes)

    def recipe_of(self, variant: str) -> TrainConfig:
        """Return a variant's recipe: ``base_of`` with the variant's changes."""
        return with_changes(self.base_of(variant), VARIANTS[variant])

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


def _with_recipe(base: TrainConfig, name: str) -> TrainConfig:
    """Return a recipe with the base's data and epochs; warm-up is scaled in proportion."""
    recipe, epochs = RECIPES[name](), base.optim.epochs
    warmup = recipe.optim.warmup_epochs * epochs / recipe.optim.epochs
    optim = replace(recipe.optim, epochs=epochs, warmup_epochs=warmup)
    return replace(recipe, optim=optim, monitor=base.monitor, data=base.data, run=base.run)


def _scale(name: Any, *, recipe: str, settings: Changes | None = None, **attributes: Any) -> Scale:
    base = with_changes(RECIPES[recipe](), settings or {})
    return Scale(name=name, recipe=recipe, base=base, **attributes)


_DATA = tomllib.loads(Path(__file__).with_name("scales.toml").read_text())
_METHODS: dict[str, dict[str, Any]] = _DATA["methods"]
SCALES: dict[ScaleName, Scale] = {
    name: _scale(name, **scale) for name, scale in _DATA["scales"].items()
}
"""Every scale by name."""


def scale(name: ScaleName, *, epochs: int = 0) -> Scale:
    """Return a scale by name, with its base recipe trained for ``epochs`` (0: the default)."""
    preset = SCALES[name]
    return replace(preset, base=with_changes(preset.base, {"epochs": epochs})) if epochs else preset
