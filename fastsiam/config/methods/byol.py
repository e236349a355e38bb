"""Settings of BYOL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import setting

from .base import ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BYOLConfig(ProjectedConfig):
    """BYOL: its heads and its momentum encoder, the target."""

    name: ClassVar[str] = "byol"
    title: ClassVar[str] = "BYOL"
    builder: ClassVar[str] = "fastsiam.methods.byol:BYOL"
    paper: ClassVar[str] = (
        "Grill et al., [Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning]"
        "(https://arxiv.org/abs/2006.07733), NeurIPS 2020"
    )

    projector_layers: int = 2
    dim: int = 256
    projector_dim: int = 4096
    predictor_dim: int = setting(4096, "Width of the predictor's hidden layer.", at_least=1)
    encoder_momentum: float = setting(0.99, "Momentum of the target encoder.", at_least=0, below=1)
    momentum_schedule: Literal["cosine", "constant"] = setting(
        "cosine",
        "Momentum of the target encoder: rising to 1 along a cosine, or constant.",
        option=False,
    )
