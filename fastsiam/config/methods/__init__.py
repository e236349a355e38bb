"""Settings of the methods: one file for each, as in ``fastsiam.methods``."""

from __future__ import annotations

from .base import MethodConfig as MethodConfig
from .byol import BYOLConfig
from .mocov2 import MoCoV2Config
from .simclr import SimCLRConfig
from .simsiam import FastSiamConfig, SimSiamConfig
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
"""The settings of each method, by its name; they say what builds it."""
