"""Methods: what is trained on a backbone, one file for each, all behind ``Method``."""

from __future__ import annotations

import torch

from fastsiam.config import MethodConfig, ModelConfig, SimSiamConfig
from fastsiam.model.backbones import Backbone, build_backbone, skeleton

from .base import Method, Output, ParamGroup, Schedule
from .simsiam import SimSiam

__all__ = [
    "METHODS",
    "Method",
    "Output",
    "ParamGroup",
    "Schedule",
    "SimSiam",
    "build_method",
    "method_skeleton",
]

METHODS: dict[type[MethodConfig], type[Method]] = {SimSiamConfig: SimSiam}
"""The class that each kind of settings builds: called with settings, backbone and ``images``."""


def build_method(config: ModelConfig, *, images: int = 0) -> Method:
    """Build the method, backbone fresh, on the CPU; seed torch before for repeatable weights.

    Args:
        config: names the backbone and the method.
        images: how many the data set holds, for methods that keep a row for each.
    """
    return _build(config, build_backbone(config), images)


def method_skeleton(config: ModelConfig, *, images: int = 0) -> Method:
    """Build the method on the meta device: names and shapes, without memory.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    backbone = skeleton(config)
    with torch.device("meta"):
        return _build(config, backbone, images)


def _build(config: ModelConfig, backbone: Backbone, images: int) -> Method:
    return METHODS[type(config.method)](config.method, backbone, images=images)
