"""Settings of SimCLR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import setting

from .base import ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCLRConfig(ProjectedConfig):
    """SimCLR: its head, its loss, and SimSiam's additions (section 6.2)."""

    name: ClassVar[str] = "simclr"
    title: ClassVar[str] = "SimCLR"
    builder: ClassVar[str] = "fastsiam.methods.simclr:SimCLR"
    paper: ClassVar[str] = (
        "Chen, Kornblith, Norouzi and Hinton, [A Simple Framework for Contrastive Learning of "
        "Visual Representations](https://arxiv.org/abs/2002.05709), ICML 2020"
    )

    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the compared branches: none (66.5), or trained (66.4)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        False,
        "Stop the gradient through the other branch (66.0 with a predictor; 66.5 without both).",
    )

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output: it does."""
        return True
