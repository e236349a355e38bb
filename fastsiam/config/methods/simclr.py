"""Settings and recipes of SimCLR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import setting

from .base import CIFAR10, LARGE_BATCH, STRONG_JITTER, Changes, ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCLRConfig(ProjectedConfig):
    """SimCLR: head, loss, and the SimSiam paper's additions (section 6.2)."""

    name: ClassVar[str] = "simclr"
    title: ClassVar[str] = "SimCLR"
    builder: ClassVar[str] = "fastsiam.methods.simclr:SimCLR"
    paper: ClassVar[str] = (
        "Chen, Kornblith, Norouzi and Hinton, [A Simple Framework for Contrastive Learning of "
        "Visual Representations](https://arxiv.org/abs/2002.05709), ICML 2020"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        # SimCLR's paper and code differ in the weight decay; this is the paper's.
        "simclr": LARGE_BATCH | STRONG_JITTER | {"method": "simclr", "lr": 0.3},
        # "With the same setting" as SimSiam (appendix D); the temperature is SimCLR's for CIFAR-10.
        "simclr_cifar10": CIFAR10 | {"method": "simclr", "dim": 2048, "temperature": 0.5},
    }

    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the two branches: none (66.5%), or trained (66.4%)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        False,
        "Stop the gradient through the other branch (66.0% with a predictor; 66.5% with neither).",
    )

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output: always."""
        return True
