"""BYOL (Grill et al., NeurIPS 2020): SimSiam with a momentum encoder for the targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsiam.config.methods.byol import BYOLConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp
from fastsiam.model.losses import negative_cosine

from .base import Method, Moment, Output
from .momentum import MomentumEncoder, rising_momentum


class BYOL(Method):
    """BYOL: an online network (encoder, projector, predictor), and a momentum encoder as target."""

    parts: tuple[str, ...] = ("backbone", "projector", "predictor")

    def __init__(self, config: BYOLConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = mlp(backbone.features, *config.hidden_widths, config.dim)
        self.predictor = mlp(config.dim, config.predictor_dim, config.dim)
        self.target = MomentumEncoder(self.backbone, self.projector)

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of two views, in [0, 8]; embeddings are the first view's projections.

        The loss is the paper's equation 2, 2 - 2 cos, summed over both directions.
        """
        _, z, p = self.by_view(views, self.backbone, self.projector, self.predictor)
        with torch.no_grad():
            [targets] = self.by_view(views, self.target)
        cosines = negative_cosine(p[0], targets[1]) + negative_cosine(p[1], targets[0])
        return Output(4 + 2 * cosines, z[0].detach(), {})

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Update the target as a moving average of the online network."""
        momentum = self.config.encoder_momentum
        if self.config.momentum_schedule == "cosine":
            momentum = rising_momentum(momentum, at.progress)
        self.target.follow(momentum)
