"""MoCo v2 (He et al., CVPR 2020; Chen et al., 2020), with the SimSiam paper's symmetrised loss.

If BN normalised a query and its key with the same images, it would leak which key belongs to which
query. MoCo's authors encode the keys in a random order over the GPUs (ShuffleBN). Here the order is
a fixed permutation: images that BN normalises together as queries are distributed evenly over its
groups as keys. Batches are random already. A fixed permutation needs no state, and is the same for
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.collectives import gather, gather_with_gradient, rank_and_world
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.model.backbones import Backbone
from fastsiam.model.batch_norm import groups_of
from fastsiam.model.heads import mlp
from fastsiam.model.losses import info_nce, unit

from .base import Method, Moment, Output
from .momentum import MomentumEncoder, push


class MoCoV2(Method):
    """MoCo v2: encoder, projector, a momentum encoder for the keys and a queue of negatives.

    The buffer ``queue`` is (queue, dim) float32: l2-normalised keys of all ranks, random at first.
    Each batch overwrites the oldest keys with those of its first view, then of its second.
    ``pushed`` is the number of keys added so far.
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
        """Compute the loss of two views; the embeddings are the first view's queries."""
        query_views, key_views = views, views[::-1]
        if not self.config.symmetric:
            query_views, key_views = views[:1], views[1:]
        _, projections = self.by_view(query_views, self.backbone, self.projector)
        queries = [unit(query) for query in projections]
        with torch.no_grad():
            keys = self._keys(key_views)
        losses = [
            info_nce(query, key, self.queue, temperature=self.config.temperature)
            for query, key in zip(queries, keys, strict=True)
        ]
        stacked_keys = torch.stack(keys[::-1], 1)  # (N, views, dim), first view first
        return Output(torch.stack(losses).mean(), queries[0].detach(), {"keys": stacked_keys})

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Update the momentum encoder, and add the keys of all ranks to the queue."""
        self.target.follow(self.config.encoder_momentum)
        keys = gather(torch.cat([output.carry["keys"] for output in outputs]))
        push(self.queue, self.pushed, keys.transpose(0, 1).flatten(0, 1))

    def _keys(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the momentum encoder's projections, l2-normalised: (N, dim) for each view."""
        images = len(views[0])
        rank, world = rank_and_world()
        groups = groups_of(self, images, world)
        if groups == 1:  # BN normalises the entire global batch together: nothing to shuffle
            [keys] = self.by_view(views, self.target)
            return [unit(key) for key in keys]
        order = torch.arange(images * world, device=views[0].device)
        shuffled_order = order.view(groups, -1).T.flatten()
        original_order = order.view(-1, groups).T.flatten()
        rank_rows = slice(rank * images, (rank + 1) * images)
        [keys] = self.by_view(
            [_gather_rows(view, shuffled_order[rank_rows]) for view in views], self.target
        )
        return [_gather_rows(unit(key), original_order[rank_rows]) for key in keys]


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows from all ranks, and return the selected ones in the same memory format."""
    if rows.dim() < 4:
        return gather_with_gradient(rows)[index]
    # Gather with channels last, so that channels-last images need no copy.
    return gather_with_gradient(rows.movedim(1, -1))[index].movedim(-1, 1)
