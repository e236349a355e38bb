"""Settings and recipes of SwAV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import require, setting

from .base import CIFAR10, LARGE_BATCH, STRONG_JITTER, Changes, ProjectedConfig

_TWO_VIEWS = LARGE_BATCH | STRONG_JITTER | {
    "method": "swav", "lr": 0.3, "lars_all": True, "warmup_from": 0.0625, "lr_end": 0.001,
    "zero_init_residual": False,
}  # fmt: skip
_MULTICROP = _TWO_VIEWS | {
    "projector_layers": 2, "epochs": 800, "views": 8, "crop": "224,224" + 6 * ",96",
    "scale_min": "0.14,0.14" + 6 * ",0.05", "scale_max": "1.0,1.0" + 6 * ",0.14",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SwAVConfig(ProjectedConfig):
    """SwAV: head, prototypes, and how images are assigned to them."""

    name: ClassVar[str] = "swav"
    title: ClassVar[str] = "SwAV"
    builder: ClassVar[str] = "fastsiam.methods.swav:SwAV"
    paper: ClassVar[str] = (
        "Caron et al., [Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments](https://arxiv.org/abs/2006.09882), NeurIPS 2020"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        "swav": _TWO_VIEWS,
        "swav_small": _MULTICROP
        | {
            "queue": 3840, "epochs": 200, "batch": 256, "lr": 0.6,
            "warmup_epochs": 0.0, "warmup_from": 0.0,
        },
        "swav_multicrop": _MULTICROP,
        # Head, prototypes and crops are from lightly's benchmark, the rates from SwAV's small-batch
        # recipe. No published run has these settings.
        "swav_cifar10": CIFAR10
        | {
            "method": "swav", "scale_min": 0.14, "projector_dim": 512, "prototypes": 512,
            "optimizer": "lars", "lars_all": True, "lr": 0.6, "weight_decay": 1e-6,
            "lr_end": 0.001,
        },
    }  # fmt: skip

    prototypes: int = setting(
        3000, "Number of prototypes (clusters) to which images are assigned.", at_least=1
    )
    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    epsilon: float = setting(
        0.05,
        "Entropy regularisation of the assignments. With smaller values, each image is assigned to "
        "fewer prototypes.",
        above=0,
        option=False,
    )
    sinkhorn_rounds: int = setting(
        3, "Sinkhorn iterations that balance the assignments.", at_least=1, option=False
    )
    frozen_epochs: float = setting(
        1.0, "Epochs at the start during which prototypes are frozen.", at_least=0, option=False
    )
    queue: int = setting(
        0, "Number of previous projections to keep, to balance small batches; 0: none.", at_least=0
    )
    queue_from: float = setting(
        15.0, "Epoch from which the queue is filled and used.", at_least=0, option=False
    )
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the two branches: none (66.5%), or trained (65.2%)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        True, "Stop the gradient through the assignments; without it training diverges."
    )

    def check_views(self, views: int) -> None:
        """Require at least two: the first two are assigned, and predicted from all others."""
        require(views >= 2, f"swav compares two or more views of each image, not {views}")

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn if there are fewer images than prototypes."""
        if (count := batch + self.queue) >= self.prototypes:
            return []
        return [
            f"{count:,} images cannot be balanced over {self.prototypes:,} prototypes; choose "
            "fewer --prototypes or a longer --queue"
        ]
