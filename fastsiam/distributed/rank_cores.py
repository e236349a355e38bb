"""Assignment of this machine's cores to ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import torch

from fastsiam.child_process import LAUNCHER
from fastsiam.kernels import cores

log = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def take_cores(device: torch.device, *, beside_gpu: bool) -> None:
    """Assign this rank its share of the machine's cores, for torch's threads and the loaders.

    The only rank of a machine takes all cores, or the CPU quota of its container. The number of
    threads in ``OMP_NUM_THREADS`` is kept, except for 1 under ``torchrun``, which sets it by
    default; set ``FASTSIAM_CORES=1`` for one thread per rank.

    Args:
        device: this rank's device.
        beside_gpu: whether to use only the cores of the GPU's NUMA node.
    """
    ranks, threads = cores.local_ranks(), os.environ.get("OMP_NUM_THREADS")
    if ranks == 1:
        cores.limit_torch_threads()  # to a container's quota
        return
    nodes = list(_SYSTEM.glob("devices/system/node/node[0-9]*"))
    if beside_gpu and device.type == "cuda" and len(nodes) > 1:
        try:
            ranks = _bind_to_gpu_node(device.index, ranks)
        except (OSError, ValueError, AttributeError) as error:
            if device.index == 0:  # the other ranks probably fail in the same way
                log.warning(f"ranks use all cores, not those of their GPUs' NUMA nodes: {error}")
    os.environ.setdefault(cores.SHARE, str(cores.share(ranks)))
    if threads is None or (threads == "1" and LAUNCHER not in os.environ):
        torch.set_num_threads(cores.own_cores())


def _bind_to_gpu_node(gpu_index: int, ranks: int) -> int:
    """Bind this process to the NUMA node of its GPU; return the number of ranks on that node.

    torch's launcher needs ``numactl`` for this, which is often missing or forbidden in containers.
    """
    nodes = [_node_of(gpu) for gpu in range(min(ranks, torch.cuda.device_count()))]
    # A launcher may have bound this rank to its node, but not the other ranks or itself.
    allowed = os.sched_getaffinity(os.getppid())
    near = [allowed & _cores_of(node) for node in nodes]
    near[gpu_index] &= os.sched_getaffinity(0)
    if not all(near):  # every rank raises, so that none binds while others use all cores
        raise OSError(f"the ranks may not use the cores near GPU {near.index(set())}")
    node_cores = near[gpu_index]
    os.sched_setaffinity(0, node_cores)
    for thread in os.listdir("/proc/self/task"):  # some libraries start threads on import
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), node_cores)
    return nodes.count(nodes[gpu_index])


def _node_of(gpu: int) -> int:
    """Return the number of a GPU's NUMA node."""
    props: Any = torch.cuda.get_device_properties(gpu)
    pci_address = f"{props.pci_domain_id:04x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
    node = int((_SYSTEM / f"bus/pci/devices/{pci_address}/numa_node").read_text())
    if node < 0:
        raise OSError(f"the system does not know the NUMA node of GPU {gpu}")
    return node


def _cores_of(node: int) -> set[int]:
    """Return the cores of a NUMA node."""
    return _numbers((_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text())


def _numbers(ranges: str) -> set[int]:
    """Parse a list of numbers such as ``0-3,8-11``."""
    numbers: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
