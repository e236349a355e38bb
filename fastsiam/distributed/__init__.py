"""Distributed training: start ranks, assign devices and cores, communicate, handle failures.

One process uses one GPU (NCCL), or a share of the CPU's cores (gloo). All ranks run the same
program; torch's launcher passes each its rank in environment variables.
"""

from __future__ import annotations

from fastsiam.launched import is_worker

from .collectives import (
    complete,
    from_all,
    from_leader,
    gather,
    gather_uneven,
    gather_with_gradient,
    mean_across_ranks,
    minimum_across_ranks,
    rank_and_world,
    sum_across_ranks,
)
from .failures import peer_is_gone, peer_is_late
from .parallel import bn_group, data_parallel, share_buffers
from .place import Place, check_devices, finish, meet, start
from .signals import STOPPING, Signalled, StopSignals

__all__ = [
    "STOPPING",
    "Place",
    "Signalled",
    "StopSignals",
    "bn_group",
    "check_devices",
    "complete",
    "data_parallel",
    "finish",
    "from_all",
    "from_leader",
    "gather",
    "gather_uneven",
    "gather_with_gradient",
    "is_worker",
    "mean_across_ranks",
    "meet",
    "minimum_across_ranks",
    "peer_is_gone",
    "peer_is_late",
    "rank_and_world",
    "share_buffers",
    "start",
    "sum_across_ranks",
]
