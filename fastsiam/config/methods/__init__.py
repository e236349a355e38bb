"""Settings and recipes of the methods, one module each, and the table of methods.

The methods themselves are in ``fastsiam.methods``. Their settings are separate so that ``--help``
does not import torch.
"""

from __future__ import annotations

from .base import MethodConfig as MethodConfig
from .byol import BYOLConfig
from .fastsiam import FastSiamConfig
from .mocov2 import MoCoV2Config
from .simclr import SimCLRConfig
from .simsiam import SimSiamConfig as SimSiamConfig
from .swav import SwAVConfig

METHOD_CONFIGS: dict[str, type[MethodConfig]] = {
    config.name: config
    for config in (
        SimSiamConfig,
        FastSiamConfig,
        SimCLRConfig,
        MoCoV2Config,
        BYOLConfig,
        SwAVConfig,
    )
}
"""The settings class of each method, by the method's name."""
