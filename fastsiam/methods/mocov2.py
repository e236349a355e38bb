"""MoCo v2 (He et al., CVPR 2020; Chen et al., 2020), its loss symmetrised as SimSiam's authors did.

BN would tell a query its key, where both were normalised among the same images. The authors encode
the keys in a random order over the GPUs (ShuffleBN). Here the order is fixed: what BN normalises
together is spread evenly over all such parts of the global batch. Batches are random already; a
fixed order is the same on any number of ranks and needs no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import MoCoV2Config
from fastsiam.distributed import gather, gather_with_gradient, rank_and_world
from fastsiam.model.backbones import Backbone
from fastsiam.model.batch_norm import groups_of
from fastsiam.model.heads import mlp
from fastsiam.model.losses import info_nce, unit

from .base import Method, Moment, Output, ParamGroup
from .momentum import follow, momentum_copy, push, renew


class MoCoV2(Method):
    """Encoder and projector; a momentum encoder's keys, the latest of which are negatives.

    ``queue`` is (queue, dim) float32: l2-normalised keys of all ranks, of both views of a batch one
    after the other, the oldest overwritten first; random at first. ``pushed`` counts them.
    """

    parts: tuple[str, ...] = ("backbone", "projector")
    queue: Tensor
    pushed: Tensor

    def __init__(self, config: MoCoV2Config, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = mlp(backbone.features, *config.hidden_widths, config.dim, hidden_bn=False)
        self.target = momentum_copy(self.backbone, self.projector)
        self.register_buffer("queue", F.normalize(torch.randn(config.queue, config.dim)))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Return the loss, and the first view's queries.

        Args:
            views: two of (N, 3, S, S): the same images, augmented.
            index: (N,) int64 positions of the images in the data set.
        """
        images = len(index)
        asking, answering = views, views[::-1]
        if not self.config.symmetric:
            asking, answering = views[:1], views[1:]
        batches = [self.projector(self.backbone(batch)) for batch in self.joined(asking)]
        queries = [unit(query) for query in self.apart(batches, images)]
        with torch.no_grad():
            keys = self._keys(answering)
        losses = [
            info_nce(query, key, self.queue, temperature=self.config.temperature)
            for query, key in zip(queries, keys, strict=True)
        ]
        kept = torch.stack(keys[::-1], 1)  # (N, views, dim), the first view's first
        return Output(torch.stack(losses).mean(), queries[0].detach(), {"keys": kept})

    def param_groups(self) -> list[ParamGroup]:
        """One group of what is trained, of which the momentum encoder is none."""
        own = nn.Sequential(self.backbone, self.projector)
        return [ParamGroup(name="all", params=list(own.parameters()))]

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of some parts; the momentum encoder is the same afterwards."""
        super().start_from(weights)
        renew(self.target, self.backbone, self.projector)

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Move the momentum encoder, and put the keys of all ranks into the queue."""
        follow(self.target, self.backbone, self.projector, momentum=self.config.encoder_momentum)
        keys = gather(torch.cat([output.carry["keys"] for output in outputs]))
        push(self.queue, self.pushed, keys.transpose(0, 1).flatten(0, 1))

    def _keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the momentum encoder's projections, l2-normalised: (N, dim) of each view."""
        images = len(views[0])
        rank, world = rank_and_world()
        parts = groups_of(self, images, world)
        if parts == 1:  # there is no other part to be dealt to
            batches = [self.target(batch) for batch in self.joined(views)]
            return [unit(key) for key in self.apart(batches, images)]
        order = torch.arange(images * world, device=views[0].device)
        mixed = order.view(parts, -1).T.flatten()
        back = order.view(-1, parts).T.flatten()
        own = slice(rank * images, (rank + 1) * images)
        shuffled = self.joined([_taken(view, mixed[own]) for view in views])
        keys = self.apart([self.target(batch) for batch in shuffled], images)
        return [_taken(unit(key), back[own]) for key in keys]


def _taken(rows: Tensor, which: Tensor) -> Tensor:
    """Return some rows of all ranks', in the rows' memory format."""
    if rows.dim() < 4:
        return gather_with_gradient(rows)[which]
    # Channels come last on the way, so that gathering copies nothing of what already lies so.
    return gather_with_gradient(rows.movedim(1, -1))[which].movedim(-1, 1)
