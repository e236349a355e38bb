"""SimSiam (Chen and He, "Exploring Simple Siamese Representation Learning", 2020)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fastsiam.config import SimSiamConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import predictor, projector
from fastsiam.model.losses import negative_cosine

from .base import Method, Output, ParamGroup


class SimSiam(Method):
    """Encoder f (backbone and projector), predictor h and the symmetrised loss (algorithm 1)."""

    parts: ClassVar[tuple[str, ...]] = ("backbone", "projector", "predictor")

    def __init__(self, config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.backbone = backbone
        self.projector = projector(
            backbone.features,
            config.dim,
            layers=config.projector_layers,
            hidden=config.projector_dim,
        )
        self.predictor = predictor(config.dim, config.predictor_dim)
        self.dim = config.dim
        self.stop_gradient = config.stop_gradient
        self.predictor_lr = config.predictor_lr

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Return the loss, in [-1, 1], and the first view's projections for the monitors.

        Args:
            views: two, (N, 3, S, S) each: the same images, augmented twice.
            index: (N,) int64; only its length matters.
        """
        z = [self.projector(self.backbone(batch)) for batch in self.joined(views)]
        p = [self.predictor(batch) for batch in z]
        (z1, z2), (p1, p2) = self.apart(z, len(index)), self.apart(p, len(index))
        loss = negative_cosine(p1, self.target(z2)) / 2 + negative_cosine(p2, self.target(z1)) / 2
        return Output(loss, z1.detach(), {})

    def target(self, z: Tensor) -> Tensor:
        """The stop-gradient of section 4.1; switched off it shows why it is there (Fig. 2)."""
        return z.detach() if self.stop_gradient else z

    def param_groups(self) -> list[ParamGroup]:
        """Parameters by schedule: the predictor's rate may be constant. Weight decay is on all."""
        encoder = [*self.backbone.parameters(), *self.projector.parameters()]
        return [
            ParamGroup(name="encoder", params=encoder),
            ParamGroup(
                name="predictor",
                params=list(self.predictor.parameters()),
                schedule=self.predictor_lr,
            ),
        ]
