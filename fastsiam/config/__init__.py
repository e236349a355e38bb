"""Every setting, as frozen dataclasses of the standard library alone: nothing here loads torch.

``train`` and its sections (``data``, ``views``, ``model``), ``convert``, ``evaluate``; ``recipes``
are named starting points; ``flags`` and ``plain`` are the same settings for command lines and
records; ``files`` reads settings files and says what beats what.
"""

from __future__ import annotations

from .checks import require
from .convert import ConvertConfig
from .data import (
    AUTOMATIC,
    ColumnNames,
    DataConfig,
    ImagePipeline,
    Pipeline,
    PipelineSetting,
)
from .methods import (
    METHOD_CONFIGS,
    BYOLConfig,
    FastSiamConfig,
    HeadNorm,
    MethodConfig,
    MoCoV2Config,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
)
from .model import OWN_BACKBONES, BackboneConfig, ModelConfig, Stem
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
    "AUTOMATIC",
    "METHOD_CONFIGS",
    "OWN_BACKBONES",
    "AugmentConfig",
    "BYOLConfig",
    "BackboneConfig",
    "ColumnNames",
    "Compile",
    "ConvertConfig",
    "DataConfig",
    "FastSiamConfig",
    "HeadNorm",
    "ImagePipeline",
    "MethodConfig",
    "MoCoV2Config",
    "ModelConfig",
    "MonitorConfig",
    "NumericsConfig",
    "OptimConfig",
    "Pipeline",
    "PipelineSetting",
    "Precision",
    "RunConfig",
    "SimCLRConfig",
    "SimSiamConfig",
    "Stem",
    "StepConfig",
    "SwAVConfig",
    "TrainConfig",
    "ViewConfig",
    "require",
]
