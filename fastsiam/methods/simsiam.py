"""SimSiam (Chen and He, "Exploring Simple Siamese Representation Learning", 2020).

The ablations of the paper's experiments are in ``simsiam_variants.py``.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastsiam.config import SimSiamConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp
from fastsiam.model.losses import negative_cosine as D

from .base import Method, Output, ParamGroup


class SimSiam(Method):
    """SimSiam with encoder f (backbone, projector), predictor h, symmetrised loss (Algorithm 1)."""

    parts: tuple[str, ...] = ("backbone", "projector", "predictor")

    def __init__(self, config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        # Section 3: BN is "applied to each fully-connected layer, including its output fc" in the
        # projector, and "to its hidden fc layers" in the predictor. Table 3 compares variants.
        self.projector = mlp(
            *(backbone.features, *config.hidden_widths, config.dim),
            hidden_bn=config.head_bn != "none",
            output_bn=config.head_bn in ("default", "all"),
            output_affine=config.output_affine,
        )
        self.predictor: nn.Module = mlp(
            *(config.dim, config.predictor_dim, config.dim),
            hidden_bn=config.head_bn != "none",
            output_bn=config.head_bn == "all",
        )

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of two views, in [-1, 1]; embeddings are the first view's z, (N, d)."""
        f, h = (self.backbone, self.projector), self.predictor
        *_, (z1, z2), (p1, p2) = self.by_view(views, *f, h)
        loss = (D(p1, z2.detach()) + D(p2, z1.detach())) / 2
        return Output(loss, z1.detach(), {})

    def param_groups(self) -> list[ParamGroup]:
        """Return encoder and predictor as two groups; ``predictor_lr`` is the latter's schedule."""
        encoder = nn.Sequential(self.backbone, self.projector)
        return [
            ParamGroup(name="encoder", params=list(encoder.parameters())),
            ParamGroup(
                name="predictor",
                params=list(self.predictor.parameters()),
                schedule=self.config.predictor_lr,
            ),
        ]
