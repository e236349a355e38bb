"""Methods: what is trained, given a backbone. One file for each; today SimSiam."""

from __future__ import annotations

from fastsiam.config import ModelConfig
from fastsiam.model.backbones import build_backbone

from .simsiam import SimSiam

__all__ = ["SimSiam", "build_method"]


def build_method(config: ModelConfig) -> SimSiam:
    """Build the method, backbone fresh, on the CPU; seed torch before for repeatable weights."""
    return SimSiam(config, build_backbone(config))
