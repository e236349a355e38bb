"""Free memory for images, on a GPU or on the host, within the limits of a container.

Importing it does not load torch.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOADING_PEAK = 1.2
"""Peak memory of loading images into memory, as a multiple of their decoded bytes."""
USABLE = 0.8
"""Share of the free memory that loading may take."""
_ROOT = Path("/")
"""Where proc/ and sys/ are, for tests."""


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, for all ranks that share it together."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return min(_free_of_the_system(), *_left_by_control_groups())


def _free_of_the_system() -> int:
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_by_control_groups() -> list[int]:
    """Return the bytes below the limits of this process's control groups, of version 1 or 2.

    Inactive cached files count as free: the system drops them when memory is asked for.
    """
    found = []
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
                found.append(max(0, most - taken + int(stat[cached])))
    return found or [2**63]


def _groups(top: Path, own: str) -> list[Path]:
    """Return the folders of this process's control group, and of those that contain it."""
    groups = [top]  # a container sees nothing else
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            if own in line:
                for part in Path(line.rpartition(":")[2]).parts[1:]:
                    groups.append(groups[-1] / part)
    return groups
