"""Settings of the tests' runs: single ones changed by name, resolved, as a command line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fastsiam.config import ModelConfig, SimSiamConfig, TrainConfig
from fastsiam.config.train import as_arguments
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.train.images import RunImages
from fastsiam.train.resolve import ResolvedConfig
from fastsiam.train.start import Start


def model_of(**settings: Any) -> ModelConfig:
    """Return a model with SimSiam, by fields of the backbone's settings and of SimSiam's."""
    own = {f.name: settings.pop(f.name) for f in fields(SimSiamConfig) if f.name in settings}
    return ModelConfig(method=SimSiamConfig(**own), **settings)


def changed_model(model: ModelConfig, **settings: Any) -> ModelConfig:
    """Change single settings of a model: of its method, and of its backbone."""
    own = {f.name: settings.pop(f.name) for f in fields(model.method) if f.name in settings}
    return replace(model, method=replace(model.method, **own), **settings)


def with_settings(config: TrainConfig, **settings: object) -> TrainConfig:
    """Change single settings of a config by their flags' names, whatever their section."""
    known = config.to_flags()
    assert set(settings) <= set(known), set(settings) - set(known)
    given = {name: str(x) if isinstance(x, Path) else x for name, x in settings.items()}
    return TrainConfig.from_flags(known | given)


def flags(config: TrainConfig, recipe: str = "imagenet") -> list[str]:
    """Return the command line of a config."""
    return ["--recipe", recipe, *as_arguments(config.to_flags())]


def resolved_as(config: TrainConfig, place: Place) -> ResolvedConfig:
    """Return settings without "auto" as those of a new run on noise."""
    return ResolvedConfig(
        asked=config, config=config, place=place, beginning=Start(), images=RunImages()
    )


class Said(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
