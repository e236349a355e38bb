"""SimSiam (Chen and He, "Exploring Simple Siamese Representation Learning", 2020).

``simsiam_variants.py`` has the variants of the paper's experiments.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastsiam.config import SimSiamConfig
from fastsiam.model import heads
from fastsiam.model.backbones import Backbone
from fastsiam.model.losses import negative_cosine as D

from .base import Method, Output, ParamGroup


class SimSiam(Method):
    """Encoder f (backbone and projector), predictor h and the symmetrised loss (Algorithm 1)."""

    parts: tuple[str, ...] = ("backbone", "projector", "predictor")

    def __init__(self, config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = heads.projector(
            backbone.features,
            config.dim,
            layers=config.projector_layers,
            hidden=config.projector_dim,
            norm=config.head_bn,
            affine=config.output_affine,
        )
        self.predictor: nn.Module = heads.predictor(
            config.dim, config.predictor_dim, norm=config.head_bn
        )

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Return the loss in [-1, 1] and the first view's projections (N, d).

        Args:
            views: two of (N, 3, S, S): the same images, augmented.
            index: (N,) int64 positions of the images in the data set; not used.
        """
        z = [self.projector(self.backbone(x)) for x in self.join_views(views)]
        p = [self.predictor(batch) for batch in z]
        z1, z2 = self.split_views(z, len(index))
        p1, p2 = self.split_views(p, len(index))
        loss = (D(p1, z2.detach()) + D(p2, z1.detach())) / 2
        return Output(loss, z1.detach(), {})

    def param_groups(self) -> list[ParamGroup]:
        """Return encoder and predictor as two groups; the predictor's rate may be constant."""
        encoder = nn.Sequential(self.backbone, self.projector)
        return [
            ParamGroup(name="encoder", params=list(encoder.parameters())),
            ParamGroup(
                name="predictor",
                params=list(self.predictor.parameters()),
                schedule=self.config.predictor_lr,
            ),
        ]
