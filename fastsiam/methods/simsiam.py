"""SimSiam (Chen and He, "Exploring Simple Siamese Representation Learning", 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastsiam.config import ModelConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import predictor, projector
from fastsiam.model.losses import negative_cosine


class SimSiam(nn.Module):
    """Encoder f (backbone and projector), predictor h and the symmetrised loss (algorithm 1)."""

    def __init__(self, config: ModelConfig, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector(
            backbone.features,
            config.dim,
            layers=config.projector_layers,
            hidden=config.projector_dim,
        )
        self.predictor = predictor(config.dim, config.predictor_dim)
        self.stop_gradient = config.stop_gradient
        self.views_together = False
        """Whether both views go through the layers as one batch; BN then has to know of it."""

    def forward(self, view1: Tensor, view2: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the first view's projections for the monitors.

        BN normalises each view by its own statistics, as in the authors' code: the layers run once
        for each view, or once for both with ``ViewBatchNorm``. All lies within one forward, because
        DistributedDataParallel reduces the gradients of one forward.

        Args:
            view1: (N, 3, S, S) normalised images.
            view2: the same images, augmented anew.

        Returns:
            Scalar float32 loss in [-1, 1]; (N, dim) projections without gradient.
        """
        if self.views_together:
            z = self.projector(self.backbone(torch.cat([view1, view2])))
            (z1, z2), (p1, p2) = z.chunk(2), self.predictor(z).chunk(2)
        else:
            z1, z2 = (self.projector(self.backbone(view)) for view in (view1, view2))
            p1, p2 = self.predictor(z1), self.predictor(z2)
        loss = negative_cosine(p1, self.target(z2)) / 2 + negative_cosine(p2, self.target(z1)) / 2
        return loss, z1.detach()

    def target(self, z: Tensor) -> Tensor:
        """The stop-gradient of section 4.1; switched off it shows why it is there (Fig. 2)."""
        return z.detach() if self.stop_gradient else z

    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters by schedule: the predictor's rate may be constant. Weight decay is on all."""
        encoder = [*self.backbone.parameters(), *self.projector.parameters()]
        return [
            {"params": encoder, "name": "encoder"},
            {"params": list(self.predictor.parameters()), "name": "predictor"},
        ]
