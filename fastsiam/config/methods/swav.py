"""Settings of SwAV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fastsiam.config.setting import require, setting

from .base import ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SwAVConfig(ProjectedConfig):
    """SwAV: its head, its prototypes, and how images are assigned to them."""

    name: ClassVar[str] = "swav"
    title: ClassVar[str] = "SwAV"
    builder: ClassVar[str] = "fastsiam.methods.swav:SwAV"
    paper: ClassVar[str] = (
        "Caron et al., [Unsupervised Learning of Visual Features by Contrasting Cluster "
        "Assignments](https://arxiv.org/abs/2006.09882), NeurIPS 2020"
    )

    prototypes: int = setting(
        3000, "Number of prototypes (clusters) to which images are assigned.", at_least=1
    )
    temperature: float = setting(0.1, "Temperature of the softmax over similarities.", above=0)
    epsilon: float = setting(
        0.05,
        "Entropy of the Sinkhorn assignments; smaller is nearer to one prototype each.",
        above=0,
        option=False,
    )
    sinkhorn_rounds: int = setting(
        3, "Sinkhorn iterations that balance the assignments.", at_least=1, option=False
    )
    frozen_epochs: float = setting(
        1.0, "Epochs at the start in which prototypes are not trained.", at_least=0, option=False
    )
    queue: int = setting(
        0, "Projections of earlier batches to keep, which balance small ones; 0: none.", at_least=0
    )
    queue_from: float = setting(
        15.0, "Epoch from which the queue is filled and used.", at_least=0, option=False
    )
    predictor: Literal["trained", "none"] = setting(
        "none", "Predictor on one of the compared branches: none (66.5), or trained (65.2)."
    )
    predictor_dim: int = setting(
        512, "Width of the predictor's hidden layer, if there is a predictor.", at_least=1
    )
    stop_gradient: bool = setting(
        True, "Stop the gradient through the assignments; without it training diverges."
    )

    def check_views(self, views: int) -> None:
        """Take two or more: the first two are assigned, and predicted from all others."""
        require(views >= 2, f"swav compares two views of each image or more, not {views}")

    def doubts(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn of fewer images than prototypes."""
        if (there := batch + self.queue) >= self.prototypes:
            return []
        return [
            f"{there:,} images cannot be balanced over {self.prototypes:,} prototypes: fewer "
            "prototypes, or a longer queue"
        ]
