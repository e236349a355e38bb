"""The sizes at which the studies are run: a base recipe each, and how its networks are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.study import ScaleName
from fastsiam.study.related import RELATED, small, with_recipes
from fastsiam.study.variants import Change, Variant, times_batch, unchanged

Measure = Literal["kNN top-1", "linear top-1"]

_LOG_LINES = 25
"""Lines of metrics of a run, about."""
_SAVES = 20
"""Checkpoints of a long run, at most; a killed run repeats at most such a part."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A base recipe, which the variants change, on images of one kind."""

    name: ScaleName
    title: str
    """Network and images, for people."""
    recipe: str
    """Name of the recipe that the base is made of."""
    base: TrainConfig
    methods: Mapping[str, Change]
    """What turns the base into the recipe of each method."""
    images: int
    """Training images that it is meant for."""
    classes: int
    measure: Measure
    cached: bool = False
    """Whether linear evaluation is of features computed once, without augmentation (--cached)."""
    seeds: int = 3
    """Runs of each row if nobody says how many."""

    @property
    def makes_images(self) -> bool:
        """Whether the images are the demo's, which are made where they are missing."""
        return self.name == "demo"

    @property
    def chance(self) -> float:
        """Top-1 of a guess, in percent."""
        return 100 / self.classes

    def base_of(self, variant: Variant) -> TrainConfig:
        """Return the recipe that a variant changes: its method's."""
        return self.methods[variant.method](self.base) if variant.method else self.base

    def changed(self, variant: Variant) -> TrainConfig:
        """Return the recipe as a variant changes it."""
        return variant.change(self.base_of(variant))

    def settings(self, variant: Variant, *, seed: int) -> TrainConfig:
        """Return the settings of a variant's run, all but those of the machine."""
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


def scale(name: ScaleName, *, epochs: int = 0) -> Scale:
    """Return a scale.

    Args:
        name: of the scale.
        epochs: of the base recipe, in place of the scale's own; 0 leaves these.
    """
    found = SCALES[name]()
    if not epochs:
        return found
    optim = replace(found.base.optim, epochs=epochs)
    return replace(found, base=replace(found.base, optim=optim))


def paper() -> Scale:
    """The paper's own: the recipe as it is, and linear evaluation as in its appendix A."""
    return Scale(
        name="paper",
        title="ResNet-50 on ImageNet",
        recipe="imagenet",
        base=RECIPES["imagenet"](),
        methods={
            "simsiam": times_batch(0.5),  # Table 4 has 256
            **with_recipes({name: name for name in RELATED}),
        },
        images=1_281_167,
        classes=1000,
        measure="linear top-1",
        seeds=1,
    )


def cifar() -> Scale:
    """The paper's CIFAR-10 recipe, a quarter as long."""
    recipe = RECIPES["cifar10"]()
    return Scale(
        name="cifar",
        title="ResNet-18 on CIFAR-10",
        recipe="cifar10",
        base=replace(recipe, optim=replace(recipe.optim, epochs=200)),
        methods={
            "simsiam": unchanged,
            **with_recipes({name: f"{name}_cifar10" for name in RELATED}),
        },
        images=50_000,
        classes=10,
        measure="kNN top-1",
    )


def cifar_small() -> Scale:
    """A narrow network on 10,000 images of CIFAR-10: ``fastsiam convert cifar10 --limit 10000``."""
    recipe = RECIPES["cifar10"]()
    method = replace(recipe.model.method, dim=512, predictor_dim=128)  # type: ignore[call-arg]
    return Scale(
        name="cifar-small",
        title="ResNet-18, 16 wide, on 10,000 images of CIFAR-10",
        recipe="cifar10",
        base=replace(
            recipe,
            augment=recipe.augment.changed(crop=24),
            model=replace(recipe.model, width=16, method=method),
            optim=replace(recipe.optim, epochs=6, batch=128, lr=0.2),
            monitor=replace(recipe.monitor, knn_every=3),
        ),
        methods={
            "simsiam": unchanged,
            **small({"simclr": 0.4, "mocov2": 0.2, "byol": 0.2, "swav": 0.4}, queue=4096),
        },
        images=10_000,
        classes=10,
        measure="kNN top-1",
        cached=True,
    )


def demo() -> Scale:
    """The demo's recipe on its images, a little smaller: a run takes minutes on two cores."""
    recipe = RECIPES["demo"]()
    return Scale(
        name="demo",
        title="ResNet-10, 16 wide, on the demo's images",
        recipe="demo",
        base=replace(
            recipe,
            augment=recipe.augment.changed(crop=24),
            optim=replace(recipe.optim, epochs=12),
            step=replace(recipe.step, compile="off"),
            monitor=replace(recipe.monitor, knn_every=4),
        ),
        methods={
            "simsiam": unchanged,
            **small({"simclr": 0.4, "mocov2": 0.4, "byol": 0.4, "swav": 0.4}, queue=1024),
        },
        images=4_000,
        classes=10,
        measure="kNN top-1",
        cached=True,
    )


SCALES: dict[ScaleName, Callable[[], Scale]] = {
    "paper": paper,
    "cifar": cifar,
    "cifar-small": cifar_small,
    "demo": demo,
}
