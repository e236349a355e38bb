"""Distributed training: start ranks, assign devices and cores, communicate, handle failures.

One process uses one GPU (NCCL), or a share of the CPU's cores (gloo). All ranks run the same
program; torch's launcher passes each its rank in environment variables.
"""

from __future__ import annotations

from fastsiam.child_process import is_worker as is_worker
from fastsiam.collectives import check_same_images as check_same_images
from fastsiam.collectives import closing_unless_lost as closing_unless_lost
from fastsiam.collectives import complete as complete
from fastsiam.collectives import from_all as from_all
from fastsiam.collectives import from_leader as from_leader
from fastsiam.collectives import gather as gather
from fastsiam.collectives import gather_uneven as gather_uneven
from fastsiam.collectives import gather_with_gradient as gather_with_gradient
from fastsiam.collectives import mean_across_ranks as mean_across_ranks
from fastsiam.collectives import minimum_across_ranks as minimum_across_ranks
from fastsiam.collectives import peer_is_gone as peer_is_gone
from fastsiam.collectives import peer_is_late as peer_is_late
from fastsiam.collectives import rank_and_world as rank_and_world
from fastsiam.collectives import sum_across_ranks as sum_across_ranks

from .parallel import bn_group as bn_group
from .parallel import data_parallel as data_parallel
from .parallel import share_buffers as share_buffers
from .place import Place as Place
from .place import assigned_rank_and_world as assigned_rank_and_world
from .place import check_devices as check_devices
from .place import finish as finish
from .place import meet as meet
from .place import start as start
from .place import wait_for_failed_rank as wait_for_failed_rank
from .stop_signals import Signalled as Signalled
from .stop_signals import StopSignals as StopSignals
