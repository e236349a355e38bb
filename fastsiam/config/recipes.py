"""Recipes: named starting configurations, which the settings classes of the methods define.

``docs/train.md`` has the accuracy that each recipe should reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .methods import METHOD_CONFIGS
from .methods.base import Changes
from .train import TrainConfig

CHANGES: dict[str, Changes] = {
    name: changes for config in METHOD_CONFIGS.values() for name, changes in config.recipes.items()
}
"""The settings that each recipe changes from the defaults, by name."""

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    name: partial(TrainConfig.from_flags, changes) for name, changes in CHANGES.items()
}
"""Every recipe by name. The first is the default."""
