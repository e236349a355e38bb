"""The sizes at which the studies are run: a base recipe each, and how its networks are measured.

They are data, in ``scales.toml``. At the scales ``paper`` and ``cifar`` the related methods are
their own recipes, as long as the base. At the small ones a method has the base's network, views and
epochs, with heads, a loss and a rate of its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fastsiam.config import METHOD_CONFIGS, TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.study import ScaleName
from fastsiam.study.catalogue import Changes, Variant, changed

Measure = Literal["kNN top-1", "linear top-1"]
Device = Literal["auto", "cuda", "cpu"]

_LOG_LINES = 25
"""Lines of metrics of a run, about."""
_SAVES = 20
"""Checkpoints of a long run, at most; a killed run repeats at most such a part."""
_MOCO_GROUP = 32
"""Images that share BN statistics: 256 on 8 GPUs were MoCo's."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A base recipe, which the variants change, on images of one kind."""

    name: ScaleName
    title: str
    """Network and images, for people."""
    recipe: str
    """Name of the recipe that the base is made of."""
    base: TrainConfig
    images: int
    """Training images that it is meant for."""
    classes: int
    measure: Measure
    cached: bool = False
    """Whether linear evaluation is of features computed once, without augmentation (--cached)."""
    seeds: int = 3
    """Runs of each row if nobody says how many."""
    recipes: Mapping[str, str] = field(default_factory=dict)
    """Names of the related methods' own recipes, by the methods."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates (for a batch of 256) of the methods that have no recipe of their own."""
    queue: int = 0
    """MoCo's among them, in projections; every image adds two in an epoch."""
    simsiam_batch: int = 0
    """Batch of SimSiam among the related methods; 0 is the base's."""

    @property
    def makes_images(self) -> bool:
        """Whether the images are the demo's, which are made where they are missing."""
        return self.name == "demo"

    @property
    def chance(self) -> float:
        """Top-1 of a guess, in percent."""
        return 100 / self.classes

    def on(self, data: str, *, gpus: int, device: Device) -> Scale:
        """Return the scale with this machine's images and devices."""
        own = replace(self.base.data, data=data)
        run = replace(self.base.run, gpus=gpus, device=device)
        return replace(self, base=replace(self.base, data=own, run=run))

    def base_of(self, variant: Variant) -> TrainConfig:
        """Return the recipe that a variant changes: its method's."""
        base, method = self.base, variant.method
        if method == "simsiam":
            batch = self.simsiam_batch or base.optim.batch
            return replace(base, optim=replace(base.optim, batch=batch))
        if method in self.recipes:
            return _with_recipe(base, self.recipes[method])
        return self._small(method) if method else base

    def changed(self, variant: Variant) -> TrainConfig:
        """Return the recipe as a variant changes it."""
        return changed(self.base_of(variant), variant.changes)

    def settings(self, variant: Variant, *, seed: int) -> TrainConfig:
        """Return the settings of a variant's run."""
        config = self.changed(variant)
        per_epoch = max(1, self.images // config.optim.batch)
        total = config.optim.epochs * per_epoch
        return replace(
            config,
            numerics=replace(config.numerics, seed=seed),
            run=replace(
                config.run,
                tracker="none",
                log_every=max(1, total // _LOG_LINES),
                save_every=min(1000, max(per_epoch, total // _SAVES)),
            ),
        )

    def _small(self, method: str) -> TrainConfig:
        """Return the base recipe with another method's heads, loss and rate."""
        base, numerics, heads = self.base, self.base.numerics, dict[str, Any](_METHODS[method])
        if method == "mocov2":
            numerics = replace(numerics, sync_bn=False, bn_images=_MOCO_GROUP)
            heads["queue"] = self.queue
        if method == "swav":
            heads["frozen_epochs"] = min(1.0, base.optim.epochs / 10)
        return replace(
            base,
            model=replace(base.model, method=METHOD_CONFIGS[method](**heads)),
            optim=replace(base.optim, lr=self.rates[method]),
            numerics=numerics,
        )


def _with_recipe(base: TrainConfig, name: str) -> TrainConfig:
    """Return a recipe as long as the base, on its images; its warm-up is in proportion."""
    own, epochs = RECIPES[name](), base.optim.epochs
    warmup = own.optim.warmup_epochs * epochs / own.optim.epochs
    optim = replace(own.optim, epochs=epochs, warmup_epochs=warmup)
    return replace(own, optim=optim, monitor=base.monitor, data=base.data, run=base.run)


def _scale(name: Any, *, recipe: str, settings: Changes | None = None, **others: Any) -> Scale:
    base = changed(RECIPES[recipe](), settings or {})
    return Scale(name=name, recipe=recipe, base=base, **others)


_DATA = tomllib.loads(Path(__file__).with_name("scales.toml").read_text())
_METHODS: dict[str, Changes] = _DATA["methods"]
SCALES: dict[ScaleName, Scale] = {
    name: _scale(name, **scale) for name, scale in _DATA["scales"].items()
}
"""Every scale by its name."""


def scale(name: ScaleName, *, epochs: int = 0) -> Scale:
    """Return a scale.

    Args:
        name: of the scale.
        epochs: of the base recipe instead of the scale's own; 0 leaves these.
    """
    found = SCALES[name]
    return replace(found, base=changed(found.base, {"epochs": epochs})) if epochs else found
