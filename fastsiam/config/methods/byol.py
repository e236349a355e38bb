"""Settings and recipes of BYOL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import setting

from .base import CIFAR10, LARGE_BATCH, Changes, ProjectedConfig

_IMAGENET = LARGE_BATCH | {
    "method": "byol", "lr": 0.45, "saturation": 0.2, "blur_p": "1.0,0.1", "solarise_p": "0.0,0.2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BYOLConfig(ProjectedConfig):
    """BYOL: heads, and the momentum encoder that computes the targets."""

    name: ClassVar[str] = "byol"
    title: ClassVar[str] = "BYOL"
    builder: ClassVar[str] = "fastsiam.methods.byol:BYOL"
    paper: ClassVar[str] = (
        "Grill et al., [Bootstrap Your Own Latent: A New Approach to Self-Supervised Learning]"
        "(https://arxiv.org/abs/2006.07733), NeurIPS 2020"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        # The three recipes of BYOL's code, for 100, 300 and 1000 epochs. The latter two have the
        # epochs of the SimSiam paper.
        "byol": _IMAGENET,
        "byol_300": _IMAGENET | {"epochs": 200, "lr": 0.3},
        "byol_1000": _IMAGENET
        | {"epochs": 800, "lr": 0.2, "weight_decay": 1.5e-6, "encoder_momentum": 0.996},
        # lightly's benchmark. Its loss is the mean of -cos. With the sum of 2 - 2 cos, a quarter of
        # the rate and four times the weight decay give the same steps.
        "byol_cifar10": CIFAR10
        | {
            "method": "byol", "scale_min": 0.08, "projector_dim": 1024, "predictor_dim": 1024,
            "momentum_schedule": "constant", "weight_decay": 2e-3,
        },
    }  # fmt: skip

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
