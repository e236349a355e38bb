"""Helpers that build, change and resolve the configs of test runs, and a small checkpoint."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam.config import ModelConfig, TrainConfig
from fastsiam.config.train import as_arguments
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.train.resolve import ResolvedConfig
from fastsiam.train.run_images import RunImages
from fastsiam.train.start import Start


def with_model_settings(model: ModelConfig, **settings: Any) -> ModelConfig:
    """Replace fields of a model config or of its method's config."""
    method_settings = {
        f.name: settings.pop(f.name) for f in fields(model.method) if f.name in settings
    }
    return replace(model, method=replace(model.method, **method_settings), **settings)


def make_model_config(**settings: Any) -> ModelConfig:
    """Build a SimSiam model config from fields of ``ModelConfig`` and ``SimSiamConfig``."""
    return with_model_settings(ModelConfig(), **settings)


TINY = make_model_config(
    backbone="resnet10", stem="cifar", width=4, projector_layers=2, dim=16, predictor_dim=4
)
"""A tiny model, for fast tests."""


def with_settings(config: TrainConfig, **settings: object) -> TrainConfig:
    """Replace settings of a config by flag name, in any section."""
    known = config.to_flags()
    assert set(settings) <= set(known), set(settings) - set(known)
    changes = {name: str(x) if isinstance(x, Path) else x for name, x in settings.items()}
    return TrainConfig.from_flags(known | changes)


def flags(config: TrainConfig, recipe: str = "imagenet") -> list[str]:
    """Return a config as command-line arguments."""
    return ["--recipe", recipe, *as_arguments(config.to_flags())]


def make_resolved_config(config: TrainConfig, place: Place) -> ResolvedConfig:
    """Wrap a config without "auto" settings as the resolved config of a new run on noise."""
    return ResolvedConfig(
        user_config=config, config=config, place=place, beginning=Start(), images=RunImages()
    )


def make_checkpoint(step: int = 3) -> Checkpoint:
    """Build the checkpoint of a network and an optimizer with one tensor each."""
    return Checkpoint(
        config=TrainConfig(),
        step=step,
        seconds=1.5,
        images=100,
        steps_per_epoch=4,
        model={"weight": torch.full((10,), float(step))},
        optimizer={"state": {0: {"momentum_buffer": torch.ones(10)}}, "param_groups": []},
        scaler={},
    )


class RecordingConsole(Console):
    """A console that records its messages and warnings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
