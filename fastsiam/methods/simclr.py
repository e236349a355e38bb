"""SimCLR (Chen, Kornblith, Norouzi and Hinton, ICML 2020), and its variants in the SimSiam paper.

The paper's section 6.2 "append[s] the extra predictor to one branch and stop-gradient to the other
branch, and symmetrize[s] this by swapping". So the anchors are the predictor's outputs, and they
are compared with plain projections.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastsiam.collectives import gather_with_gradient, rank_and_world
from fastsiam.config.methods.simclr import SimCLRConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp
from fastsiam.model.losses import nt_xent, unit

from .base import Method, Output


class SimCLR(Method):
    """SimCLR: encoder and projector, with a contrastive loss over all images of a batch."""

    parts: tuple[str, ...] = ("backbone", "projector")

    def __init__(self, config: SimCLRConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = mlp(backbone.features, *config.hidden_widths, config.dim, output_bn=True)
        self.predictor: nn.Module = nn.Identity()
        if config.predictor == "trained":
            self.parts = ("backbone", "projector", "predictor")
            self.predictor = mlp(config.dim, config.predictor_dim, config.dim)

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss over all ranks' images; embeddings are the first view's projections."""
        _, *outputs = self.by_view(views, self.backbone, self.projector, self.predictor)
        z, p = ([unit(view) for view in output] for output in outputs)
        stop = self.config.stop_gradient
        all_projections = [gather_with_gradient(view.detach() if stop else view) for view in z]
        rank, _ = rank_and_world()
        loss = nt_xent(
            p, all_projections, first=rank * len(index), temperature=self.config.temperature
        )
        return Output(loss, z[0].detach(), {})
