"""All settings, as frozen dataclasses. Importing this package does not import torch.

``setting`` has the classes ``Setting`` and ``Config``. ``train``, ``convert``, ``evaluate`` and
others define the settings, ``recipes`` named starting points. ``settings_files`` reads and merges
settings.
"""

from __future__ import annotations

from .convert import ConvertConfig as ConvertConfig
from .data import AUTOMATIC as AUTOMATIC
from .data import ColumnNames as ColumnNames
from .data import DataConfig as DataConfig
from .data import ImagePipeline as ImagePipeline
from .data import Pipeline as Pipeline
from .data import PipelineSetting as PipelineSetting
from .methods import METHOD_CONFIGS as METHOD_CONFIGS
from .methods import MethodConfig as MethodConfig
from .methods import SimSiamConfig as SimSiamConfig
from .model import OWN_BACKBONES as OWN_BACKBONES
from .model import BackboneConfig as BackboneConfig
from .model import ModelConfig as ModelConfig
from .model import Stem as Stem
from .run import RunConfig as RunConfig
from .setting import require as require
from .train import Compile as Compile
from .train import MonitorConfig as MonitorConfig
from .train import NumericsConfig as NumericsConfig
from .train import OptimConfig as OptimConfig
from .train import Precision as Precision
from .train import StepConfig as StepConfig
from .train import TrainConfig as TrainConfig
from .views import AugmentConfig as AugmentConfig
from .views import ViewConfig as ViewConfig
