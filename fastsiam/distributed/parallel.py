"""Modules whose gradients, and whose BN statistics, are those of several ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastsiam.config import NumericsConfig
from fastsiam.distributed.place import Place

_BUCKET_MB = 25
"""MB of gradients that ranks exchange at once, beside the backward pass."""


def bn_group(place: Place, config: NumericsConfig) -> dist.ProcessGroup | None:
    """Return the ranks that share BN statistics with this one, none if it is alone.

    Every rank calls it: the groups are ``sync_bn_ranks`` ranks in a row, or all ranks. They are not
    the group that gradients are exchanged in: NCCL would have each of BN's exchanges wait for the
    gradients that went before.
    """
    size = config.sync_bn_ranks or place.world
    if place.world == 1 or not config.sync_bn or size == 1:
        return None
    starts = range(0, place.world, size)
    groups = [
        dist.new_group(list(range(start, start + size)), timeout=place.device_timeout)
        for start in starts
    ]
    own: dist.ProcessGroup = groups[place.rank // size]  # type: ignore[assignment]
    return own


def data_parallel(module: nn.Module, place: Place, *, same_buffers: bool) -> nn.Module:
    """Wrap a module that is on its device for data-parallel training; alone it stays as it is.

    Args:
        module: whose gradients are averaged over the ranks, while the backward pass continues. It
            keeps its own buffers equal on all ranks, and they are never sent: a row for each image
            is gigabytes.
        place: this rank.
        same_buffers: whether the buffers of its layers, BN's statistics, are the same on all ranks
            by themselves. Else those of rank 0 are sent to all before each pass.
    """
    if place.world == 1:
        return module
    if own := [name for name, _ in module.named_buffers(recurse=False)]:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, own)
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in parameters  # torch 2.13 renamed broadcast_buffers
    buffers: Any = {"forward_sync_buffers" if newer else "broadcast_buffers": not same_buffers}
    together = nn.parallel.DistributedDataParallel(
        module,
        device_ids=[place.device] if place.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=_BUCKET_MB,
        **buffers,
    )
    _settle_buckets(together)
    return together


def _settle_buckets(together: nn.parallel.DistributedDataParallel) -> None:
    """Have the gradients' buckets from the first step on as they are to be until the end.

    After its first pass DDP puts the gradients into other buckets, in the order in which they came.
    Where a gradient lies decides in which order three ranks or more add it up: a run that continues
    would round its first step unlike one that was never interrupted. So the first pass is one of
    zeros here, in which they come as they mostly do in training: the last layer's first.
    """
    module: Any = together.module
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    own = vars(module).get("forward")
    module.forward = lambda _: [parameter.view_as(parameter) for parameter in trained]
    out = together(torch.zeros((), device=trained[0].device))  # on a GPU, DDP wants an input
    torch.autograd.backward(out, [torch.zeros_like(parameter) for parameter in trained])
    del module.forward
    if own is not None:
        module.forward = own
    for parameter in trained:
        parameter.grad = None
