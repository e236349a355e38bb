"""MoCo v2 (He et al., CVPR 2020; Chen et al., 2020), its loss symmetrised as SimSiam's authors did.

If BN normalised a query and its key with the same images, it would leak which key belongs to which
query. The authors encode the keys in a random order over the GPUs (ShuffleBN). Here the order is
fixed: images that BN normalises together as queries are distributed evenly over the parts of the
global batch as keys. Batches are random already; a fixed order is the same for any number of ranks
and needs no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.config import MoCoV2Config
from fastsiam.distributed import gather, gather_with_gradient, rank_and_world
from fastsiam.model.backbones import Backbone
from fastsiam.model.batch_norm import groups_of
from fastsiam.model.heads import mlp
from fastsiam.model.losses import info_nce, unit

from .base import Method, Moment, Output
from .momentum import MomentumEncoder, push


class MoCoV2(Method):
    """Encoder and projector, with a momentum encoder for the keys and a queue of negatives.

    ``queue`` is (queue, dim) float32: l2-normalised keys of all ranks, random at first. Each batch
    adds the keys of its first view, then those of its second, and overwrites the oldest. ``pushed``
    counts all keys added.
    """

    parts: tuple[str, ...] = ("backbone", "projector")
    queue: Tensor
    pushed: Tensor

    def __init__(self, config: MoCoV2Config, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.config, self.backbone, self.dim = config, backbone, config.dim
        self.projector = mlp(backbone.features, *config.hidden_widths, config.dim, hidden_bn=False)
        self.target = MomentumEncoder(self.backbone, self.projector)
        self.register_buffer("queue", F.normalize(torch.randn(config.queue, config.dim)))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Return the loss of two views, and the first view's queries."""
        asking, answering = views, views[::-1]
        if not self.config.symmetric:
            asking, answering = views[:1], views[1:]
        _, projections = self.by_view(asking, self.backbone, self.projector)
        queries = [unit(query) for query in projections]
        with torch.no_grad():
            keys = self._keys(answering)
        losses = [
            info_nce(query, key, self.queue, temperature=self.config.temperature)
            for query, key in zip(queries, keys, strict=True)
        ]
        kept = torch.stack(keys[::-1], 1)  # (N, views, dim), the first view's first
        return Output(torch.stack(losses).mean(), queries[0].detach(), {"keys": kept})

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Update the momentum encoder, and add the keys of all ranks to the queue."""
        self.target.follow(self.config.encoder_momentum)
        keys = gather(torch.cat([output.carry["keys"] for output in outputs]))
        push(self.queue, self.pushed, keys.transpose(0, 1).flatten(0, 1))

    def _keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the momentum encoder's projections, l2-normalised: (N, dim) of each view."""
        images = len(views[0])
        rank, world = rank_and_world()
        parts = groups_of(self, images, world)
        if parts == 1:  # BN normalises the whole global batch together: nothing to shuffle
            [keys] = self.by_view(views, self.target)
            return [unit(key) for key in keys]
        order = torch.arange(images * world, device=views[0].device)
        mixed = order.view(parts, -1).T.flatten()
        back = order.view(-1, parts).T.flatten()
        own = slice(rank * images, (rank + 1) * images)
        [keys] = self.by_view([_gather_rows(view, mixed[own]) for view in views], self.target)
        return [_gather_rows(unit(key), back[own]) for key in keys]


def _gather_rows(rows: Tensor, which: Tensor) -> Tensor:
    """Gather rows from all ranks and return some of them, in the same memory format."""
    if rows.dim() < 4:
        return gather_with_gradient(rows)[which]
    # Gather with channels last, so that channels-last images need no copy.
    return gather_with_gradient(rows.movedim(1, -1))[which].movedim(-1, 1)
