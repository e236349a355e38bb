"""Data parallelism: averaged gradients, and shared BN statistics."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastsiam.config import NumericsConfig
from fastsiam.distributed.place import Place

_BUCKET_MB = 25
"""Size of DDP's gradient buckets, in MB."""


def bn_group(place: Place, config: NumericsConfig) -> dist.ProcessGroup | None:
    """Return the group of ranks that share BN statistics with this one; None if it shares none.

    Every rank must call it. Groups are ``sync_bn_ranks`` consecutive ranks, or all ranks. They are
    separate from the group for gradients, because in one group NCCL would make BN's collectives
    wait for earlier gradients.
    """
    size = config.sync_bn_ranks or place.world
    if place.world == 1 or not config.sync_bn or size == 1:
        return None
    starts = range(0, place.world, size)
    groups = [
        dist.new_group(list(range(start, start + size)), timeout=place.device_timeout)
        for start in starts
    ]
    group: dist.ProcessGroup = groups[place.rank // size]  # type: ignore[assignment]
    return group


@torch.no_grad()
def share_buffers(module: nn.Module, place: Place) -> None:
    """Broadcast rank 0's buffers, such as BN statistics, to all ranks; every rank must call it."""
    if place.world > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def data_parallel(module: nn.Module, place: Place, *, same_buffers: bool) -> nn.Module:
    """Wrap a module with DDP; with a single rank, return it unchanged.

    Args:
        module: the module, on its device. It must keep its direct buffers equal on all ranks. They
            are not broadcast, because per-image buffers may take gigabytes.
        place: this rank.
        same_buffers: whether the buffers of its layers, such as BN's statistics, are equal on all
            ranks. Otherwise those of rank 0 are broadcast before each forward pass.
    """
    if place.world == 1:
        return module
    if direct_buffers := [name for name, _ in module.named_buffers(recurse=False)]:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module, direct_buffers
        )
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    is_renamed = "forward_sync_buffers" in parameters  # torch 2.13 renamed broadcast_buffers
    options: Any = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": not same_buffers}
    ddp = nn.parallel.DistributedDataParallel(
        module,
        device_ids=[place.device] if place.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=_BUCKET_MB,
        **options,
    )
    _finalise_buckets(ddp)
    return ddp


def _finalise_buckets(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Run a pass with zero gradients, so that DDP's buckets are final before the first step.

    After its first pass DDP rebuilds its buckets in the order in which gradients arrived. With
    three or more ranks the bucket decides the order of summation, so the first step of a resumed
    run would round differently from that of an uninterrupted one. In this pass gradients arrive in
    the usual order of training: the last layer first.
    """
    module: Any = ddp.module
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    forward = vars(module).get("forward")
    module.forward = lambda _: [parameter.view_as(parameter) for parameter in trainable]
    out = ddp(torch.zeros((), device=trainable[0].device))  # on a GPU, DDP wants an input
    torch.autograd.backward(out, [torch.zeros_like(parameter) for parameter in trainable])
    del module.forward
    if forward is not None:
        module.forward = forward
    for parameter in trainable:
        parameter.grad = None
