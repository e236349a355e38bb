"""The cores of this machine: which of them are a rank's."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

from fastsiam.kernels import cores
from fastsiam.launched import LAUNCHER

log = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def take_cores(device: torch.device, *, beside_gpu: bool) -> None:
    """Settle on this rank's share of the machine's cores, for torch's threads and the loaders.

    Alone on the machine, a process has all of them. Threads that the user set by
    ``OMP_NUM_THREADS`` stay. Under ``torchrun``, which sets 1 itself, 1 counts as unset there:
    ``FASTSIAM_CORES=1`` pins a rank to one thread.

    Args:
        device: what this rank computes on.
        beside_gpu: on a machine of several NUMA nodes, whether to stay on those of the GPU's.
    """
    ranks = cores.local_ranks()
    if ranks == 1:
        return
    if beside_gpu and device.type == "cuda" and len(_nodes()) > 1:
        try:
            ranks = _move_beside_gpu(device.index, ranks)
        except (OSError, ValueError, AttributeError) as error:
            if device.index == 0:  # most likely it is the same with the others
                log.warning(f"ranks stay on all cores, not on those beside their GPUs: {error}")
    os.environ.setdefault(cores.SHARE, str(cores.share(ranks)))
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and LAUNCHER not in os.environ):
        torch.set_num_threads(cores.own_cores())


def _move_beside_gpu(own: int, ranks: int) -> int:
    """Keep this process on the NUMA node of its GPU; return how many of the ranks are there.

    torch's launcher can do it too, but by ``numactl``, which containers lack or must not use.
    """
    nodes = [_node_of(gpu) for gpu in range(min(ranks, torch.cuda.device_count()))]
    listed = (_SYSTEM / f"devices/system/node/node{nodes[own]}/cpulist").read_text()
    near = _numbers(listed) & os.sched_getaffinity(0)
    if not near:
        raise OSError(f"this process may use none of those beside GPU {own}, {listed.strip()}")
    os.sched_setaffinity(0, near)
    for thread in os.listdir("/proc/self/task"):  # some libraries start theirs when imported
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), near)
    return nodes.count(nodes[own])


def _nodes() -> list[Path]:
    return list((_SYSTEM / "devices/system/node").glob("node[0-9]*"))


def _node_of(gpu: int) -> int:
    """Return the number of a GPU's NUMA node."""
    at: Any = torch.cuda.get_device_properties(gpu)
    place = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    node = int((_SYSTEM / f"bus/pci/devices/{place}/numa_node").read_text())
    if node < 0:
        raise OSError(f"the system knows no NUMA node of GPU {gpu}")
    return node


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8-11``."""
    numbers: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
