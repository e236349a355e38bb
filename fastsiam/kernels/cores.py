"""Number of CPU cores that this process may use, alone or as one of several ranks."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from math import ceil
from pathlib import Path

from fastsiam.errors import DeviceError

SHARE = "FASTSIAM_CORES"
"""Environment variable that sets the number of cores of this rank."""
_ROOT = Path("/")
"""Root of the file system where control groups are read; tests replace it."""


def cores() -> int:
    """Return the number of cores this process may use, given its affinity and cgroup quotas."""
    return min([len(os.sched_getaffinity(0)), *_quotas()])


def cpu_info(field: str) -> str:
    """Return a field of the first core in Linux's /proc/cpuinfo, or ""."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return ""


@cache
def _quotas() -> list[int]:
    """Return the CPU quota, in cores, of each of this process's control groups that has one."""
    quotas = []
    for group in control_groups("sys/fs/cgroup", ""):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            quota, period = map(int, (group / "cpu.max").read_text().split())
            quotas.append(ceil(quota / period))
    for group in control_groups("sys/fs/cgroup/cpu", "cpu"):
        with contextlib.suppress(OSError, ValueError):
            files = (group / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (int(file.read_text()) for file in files)
            quotas += [ceil(quota / period)] if quota > 0 else []  # -1: no limit
    return quotas


def control_groups(home: str, controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors.

    Args:
        home: mount point of the groups, relative to the root folder.
        controller: "cpu" or "memory", or "" for the groups of cgroup v2.
    """
    groups = [_ROOT / home]  # inside a container this is the only one
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                for part in Path(path).parts[1:]:
                    groups.append(groups[-1] / part)
    return groups


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or "1")


def share(ranks: int) -> int:
    """Return the number of cores per rank if ``ranks`` share this process's cores; at least 1.

    All ranks of the machine share its quotas, even if each may use only some of the cores.
    """
    return max(1, min([cores() // ranks, *(quota // local_ranks() for quota in _quotas())]))


def own_cores() -> int:
    """Return the number of cores of this rank: ``$FASTSIAM_CORES``, or an equal share.

    Raises:
        DeviceError: the variable is not a positive integer.
    """
    value = os.environ.get(SHARE)
    if not value:
        return share(local_ranks())
    if not value.isdecimal() or int(value) < 1:
        raise DeviceError(f"{SHARE} must be a positive integer, not {value!r}")
    return int(value)


def limit_torch_threads() -> None:
    """Limit torch's threads to this process's cores, unless ``OMP_NUM_THREADS`` is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and cores() < torch.get_num_threads():
        torch.set_num_threads(cores())
