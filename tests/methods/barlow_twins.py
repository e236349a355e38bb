"""Barlow Twins (Zbontar, Jing, Misra, LeCun and Deny, ICML 2021), as a user would add it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastsiam.config import MethodConfig
from fastsiam.config.setting import setting
from fastsiam.distributed import gather_with_gradient
from fastsiam.methods import Method, Output
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class BarlowTwinsConfig(MethodConfig):
    """Settings of Barlow Twins."""

    name: ClassVar[str] = "barlow-twins"
    title: ClassVar[str] = "Barlow Twins"
    paper: ClassVar[str] = "[Barlow Twins](https://arxiv.org/abs/2103.03230), ICML 2021"
    builder: ClassVar[str] = f"{__name__}:BarlowTwins"
    recipes: ClassVar[dict[str, Any]] = {"barlow-twins": {"method": "barlow-twins", "lr": 0.2}}

    dim: int = setting(8192, "Dimension of the embeddings, and width of the projector's layers.")
    redundancy: float = setting(
        5e-3, "Weight of the correlations between different dimensions (the paper's lambda)."
    )


class BarlowTwins(Method):
    """Barlow Twins: pushes the cross-correlation matrix of two views towards the identity."""

    parts = ("backbone", "projector")

    def __init__(self, config: BarlowTwinsConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.backbone, self.dim, self.redundancy = backbone, config.dim, config.redundancy
        self.projector = mlp(backbone.features, config.dim, config.dim, config.dim)

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Return the loss over the images of all ranks and the embeddings of the first view."""
        _, z = self.by_view(views, self.backbone, self.projector)
        first, second = (standardise(gather_with_gradient(view.float())) for view in z)
        correlation = first.T @ second / len(first)
        on_diagonal = (correlation.diagonal() - 1).square().sum()
        elsewhere = correlation.square().sum() - correlation.diagonal().square().sum()
        return Output(on_diagonal + self.redundancy * elsewhere, z[0].detach(), {})


def standardise(z: Tensor) -> Tensor:
    """Standardise (N, d) embeddings: each dimension gets mean 0 and variance 1 over the batch."""
    return (z - z.mean(0)) / torch.sqrt(z.var(0, correction=0) + 1e-5)
