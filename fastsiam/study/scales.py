"""The sizes at which the studies are run: a base recipe each, and how its networks are measured.

At the scales ``paper`` and ``cifar`` the related methods are their own recipes, as long as the
base. At the small ones a method has the base's network, views and epochs; heads, loss and rate are
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fastsiam.config import (
    BYOLConfig,
    MethodConfig,
    MoCoV2Config,
    SimCLRConfig,
    SwAVConfig,
    TrainConfig,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.config.study import ScaleName
from fastsiam.study.catalogue import RELATED, Variant

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
        return variant.of(self.base_of(variant))

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
        base, numerics = self.base, self.base.numerics
        if method == "mocov2":
            numerics = replace(numerics, sync_bn=False, bn_images=_MOCO_GROUP)
        return replace(
            base,
            model=replace(base.model, method=self._heads(method)),
            optim=replace(base.optim, lr=self.rates[method]),
            numerics=numerics,
        )

    def _heads(self, method: str) -> MethodConfig:
        if method == "simclr":  # its paper's temperature for CIFAR-10 (appendix B.9)
            return SimCLRConfig(
                projector_layers=2, dim=128, projector_dim=512, predictor_dim=128, temperature=0.5
            )
        if method == "mocov2":  # as its authors' CIFAR-10 demo, whose runs are short, too
            return MoCoV2Config(
                dim=128, projector_dim=512, temperature=0.1, queue=self.queue, encoder_momentum=0.99
            )
        if method == "byol":  # its target is 33 steps behind; at 0.99 it would be a fifth of a run
            return BYOLConfig(dim=256, projector_dim=512, predictor_dim=512, encoder_momentum=0.97)
        return SwAVConfig(  # as many prototypes as a batch can be spread over
            projector_layers=2,
            dim=128,
            projector_dim=512,
            predictor_dim=128,
            prototypes=100,
            frozen_epochs=min(1.0, self.base.optim.epochs / 10),
        )


def _with_recipe(base: TrainConfig, name: str) -> TrainConfig:
    """Return a recipe as long as the base, on its images; its warm-up is in proportion."""
    own, epochs = RECIPES[name](), base.optim.epochs
    warmup = own.optim.warmup_epochs * epochs / own.optim.epochs
    optim = replace(own.optim, epochs=epochs, warmup_epochs=warmup)
    return replace(own, optim=optim, monitor=base.monitor, data=base.data, run=base.run)


def scale(name: ScaleName, *, epochs: int = 0) -> Scale:
    """Return a scale.

    Args:
        name: of the scale.
        epochs: of the base recipe instead of the scale's own; 0 leaves these.
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
        images=1_281_167,
        classes=1000,
        measure="linear top-1",
        seeds=1,
        recipes={method: method for method in RELATED},
        simsiam_batch=256,  # as Table 4
    )


def cifar() -> Scale:
    """The paper's CIFAR-10 recipe, a quarter as long."""
    recipe = RECIPES["cifar10"]()
    return Scale(
        name="cifar",
        title="ResNet-18 on CIFAR-10",
        recipe="cifar10",
        base=replace(recipe, optim=replace(recipe.optim, epochs=200)),
        images=50_000,
        classes=10,
        measure="kNN top-1",
        recipes={method: f"{method}_cifar10" for method in RELATED},
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
        images=10_000,
        classes=10,
        measure="kNN top-1",
        cached=True,
        rates={"simclr": 0.4, "mocov2": 0.2, "byol": 0.2, "swav": 0.4},
        queue=4096,
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
        images=4_000,
        classes=10,
        measure="kNN top-1",
        cached=True,
        rates={"simclr": 0.4, "mocov2": 0.4, "byol": 0.4, "swav": 0.4},
        queue=1024,
    )


SCALES: dict[ScaleName, Callable[[], Scale]] = {
    "paper": paper,
    "cifar": cifar,
    "cifar-small": cifar_small,
    "demo": demo,
}
