"""Named starting configurations. A recipe is a function; its docstring says what it reproduces."""

from __future__ import annotations

from collections.abc import Callable

from fastsiam.config import TrainConfig

from .related import (
    byol,
    byol_300,
    byol_1000,
    mocov2,
    simclr,
    swav,
    swav_multicrop,
    swav_small,
)
from .related_cifar10 import byol_cifar10, mocov2_cifar10, simclr_cifar10, swav_cifar10
from .simsiam import cifar10, demo, fastsiam, fastsiam_cifar10, imagenet

__all__ = [
    "RECIPES",
    "byol",
    "byol_300",
    "byol_1000",
    "byol_cifar10",
    "cifar10",
    "demo",
    "fastsiam",
    "fastsiam_cifar10",
    "imagenet",
    "mocov2",
    "mocov2_cifar10",
    "simclr",
    "simclr_cifar10",
    "swav",
    "swav_cifar10",
    "swav_multicrop",
    "swav_small",
]

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    f.__name__: f
    for f in (
        imagenet,
        cifar10,
        demo,
        fastsiam,
        fastsiam_cifar10,
        simclr,
        mocov2,
        byol,
        byol_300,
        byol_1000,
        swav,
        swav_small,
        swav_multicrop,
        simclr_cifar10,
        mocov2_cifar10,
        byol_cifar10,
        swav_cifar10,
    )
}
"""Every recipe by its name; the first is the one that is taken if nobody names another."""
