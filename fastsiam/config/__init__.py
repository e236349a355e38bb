"""Every setting, as frozen dataclasses of the standard library alone: nothing here loads torch.

``train`` and its sections (``data``, ``views``, ``model``), ``convert``, ``evaluate``; ``recipes``
are named starting points; ``flags`` and ``plain`` are the same settings for command lines and
records; ``files`` reads settings files and says what beats what.
"""

from __future__ import annotations

from .checks import require
from .convert import ConvertConfig
from .data import DataConfig, ImagePipeline, Pipeline, PipelineSetting
from .model import (
    METHOD_CONFIGS,
    OWN_BACKBONES,
    BackboneConfig,
    MethodConfig,
    ModelConfig,
    SimSiamConfig,
    Stem,
)
from .train import (
    Compile,
    MonitorConfig,
    NumericsConfig,
    OptimConfig,
    Precision,
    RunConfig,
    StepConfig,
    TrainConfig,
)
from .views import AugmentConfig, ViewConfig

__all__ = [
    "METHOD_CONFIGS",
    "OWN_BACKBONES",
    "AugmentConfig",
    "BackboneConfig",
    "Compile",
    "ConvertConfig",
    "DataConfig",
    "ImagePipeline",
    "MethodConfig",
    "ModelConfig",
    "MonitorConfig",
    "NumericsConfig",
    "OptimConfig",
    "Pipeline",
    "PipelineSetting",
    "Precision",
    "RunConfig",
    "SimSiamConfig",
    "Stem",
    "StepConfig",
    "TrainConfig",
    "ViewConfig",
    "require",
]
