"""Free memory of a GPU or of the host, within the limits of a container.

Importing this module does not load torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

LOADING_PEAK = 1.2
"""Peak memory of loading images into memory, as a multiple of their decoded bytes."""
USABLE = 0.8
"""Share of the free memory that loading may take."""
_ROOT = Path("/")
"""Where control groups are, for tests."""


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, for all ranks that share it together."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return host_memory()[0]


def host_memory() -> tuple[int, int]:
    """Return the free bytes of the host's memory and all of them, for this container if in one."""
    machine = psutil.virtual_memory()
    return min([(machine.available, machine.total), *_control_groups()])


def _control_groups() -> list[tuple[int, int]]:
    """Return the free bytes and the limit of this process's control groups, of version 1 or 2.

    Inactive cached files count as free: the system drops them when memory is asked for.
    """
    limits = []
    for home, own, limit, used, cached in (
        ("sys/fs/cgroup", "0::", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            ":memory:",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        top = _ROOT / home
        for group in _groups(top, own):
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max": no limit
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                limits.append((max(0, most - taken + int(stat[cached])), most))
    return limits


def _groups(top: Path, own: str) -> list[Path]:
    """Return the folders of this process's control group, and of those that contain it."""
    groups = [top]  # a container sees nothing else
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            if own in line:
                for part in Path(line.rpartition(":")[2]).parts[1:]:
                    groups.append(groups[-1] / part)
    return groups
