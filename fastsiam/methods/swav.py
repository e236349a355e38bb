"""SwAV (Caron et al., NeurIPS 2020), as described in section 6.2 of the SimSiam paper.

Prototypes are normalised within the graph ("weight-normalized [...] by full gradient computation"),
so that the ablation without stop-gradient trains through the assignments. Assignments are computed
over the images of all ranks: each rank gathers the projections and computes all assignments. This
is cheaper than an all-reduce in each round, and gives the same result for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from fastsiam.collectives import gather, gather_with_gradient, rank_and_world
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.heads import mlp
from fastsiam.model.losses import cross_entropy, sinkhorn, unit

from .base import Method, Moment, Output
from .momentum import push

_ASSIGNED_VIEWS = 2
"""Number of views with assignments: the first ones, which are the large crops in multi-crop."""


class SwAV(Method):
    """SwAV: encoder, projector and prototypes; each view predicts the other views' assignments.

    The buffer ``queue``, for small batches, exists if the setting ``queue`` is not 0. It is (queue,
    2, dim) float32: l2-normalised projections of the first two views of earlier batches. Once it is
    full, they are assigned together with the batch. ``pushed`` is the number of rows added so far.
    """

    parts: tuple[str, ...] = ("backbone", "projector", "prototypes")
    queue: Tensor
    pushed: Tensor

    def __init__(self, config: SwAVConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = mlp(backbone.features, *config.hidden_widths, config.dim)
        self.predictor: nn.Module = nn.Identity()
        if config.predictor == "trained":
            self.parts = ("backbone", "projector", "predictor", "prototypes")
            self.predictor = mlp(config.dim, config.predictor_dim, config.dim)
        self.prototypes = nn.Linear(config.dim, config.prototypes, bias=False)
        if config.queue:
            self.register_buffer("queue", torch.zeros(config.queue, _ASSIGNED_VIEWS, config.dim))
            self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss (>= 0) of two or more views; embeddings are the first view's z."""
        _, z, p = self.by_view(views, self.backbone, self.projector, self.predictor)
        z = tuple(unit(view) for view in z[:_ASSIGNED_VIEWS])
        with torch.autocast(views[0].device.type, enabled=False):
            prototypes = unit(self.prototypes.weight)
            predictions = [unit(view) @ prototypes.T / self.config.temperature for view in p]
            with torch.no_grad() if self.config.stop_gradient else nullcontext():
                codes = [
                    self._assignments(view, prototypes, assigned_view)
                    for assigned_view, view in enumerate(z)
                ]
        losses = [
            cross_entropy(code, logits)
            for assigned_view, code in enumerate(codes)
            for view, logits in enumerate(predictions)
            if view != assigned_view
        ]
        carry = {"projections": torch.stack(z, 1).detach()} if self.config.queue else {}
        return Output(torch.stack(losses).mean(), z[0].detach(), carry)

    def before_optimizer(self, *, at: Moment) -> None:
        """Freeze the prototypes in the first ``frozen_epochs`` epochs."""
        if at.step < round(self.config.frozen_epochs * at.steps_per_epoch):
            self.prototypes.weight.grad = None

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Add the projections of all ranks to the queue, from epoch ``queue_from`` on."""
        if self.config.queue and at.step >= round(self.config.queue_from * at.steps_per_epoch):
            rows = gather(torch.cat([output.carry["projections"] for output in outputs]))
            push(self.queue, self.pushed, rows)

    def _assignments(self, z: Tensor, prototypes: Tensor, view: int) -> Tensor:
        """Compute the assignments of this rank's images to the prototypes, (N, prototypes)."""
        rows = gather_with_gradient(z)
        weights = rows.new_ones(len(rows))
        if self.config.queue:
            is_full = (self.pushed >= self.config.queue).to(weights.dtype)
            weights = torch.cat([weights, is_full.expand(self.config.queue)])
            rows = torch.cat([rows, self.queue[:, view]])
        assignments = sinkhorn(
            rows @ prototypes.T,
            epsilon=self.config.epsilon,
            rounds=self.config.sinkhorn_rounds,
            weights=weights,
        )
        rank, _ = rank_and_world()
        return assignments[rank * len(z) : (rank + 1) * len(z)]
