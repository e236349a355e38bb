"""What a run takes of its machine: memory, open files, room, its GPU's clock.

Read at log points, by rank 0 alone: what a leak, a full disk or a hot GPU does to a run shows there
as well as elsewhere. It takes a fraction of a millisecond. Where the system has no ``/proc`` the
figures are None.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from fastsiam import checkpoint as checkpoints
from fastsiam.training.nvml import GpuClock, Nvml

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a run takes at a moment, and what there is."""

    memory: int | None = None
    """Bytes that this process and its workers hold for themselves: mapped files are the system's,
    which takes them away as need be."""
    files: int | None = None
    """Open files of this process."""
    memory_limit: int | None = None
    """Bytes that there are, for this container or on this machine."""
    files_limit: int | None = None
    disk_free: int | None = None
    """Bytes on the disk of the run's folder."""
    checkpoint: int = 0
    """Bytes of the run's last checkpoint; 0 if there is none yet."""
    shared_free: int | None = None
    """Bytes of shared memory, where workers put their batches."""
    shared: int | None = None
    """Bytes of shared memory, free or not."""
    gpu: GpuClock | None = None


class VitalSigns:
    """Reads the vitals of a run.

    Args:
        folder: the run's.
        device: what trains.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._checkpoint = folder, checkpoints.last(folder)
        self._nvml = Nvml(device) if device.type == "cuda" else None
        self._memory_limit = memory_limit()

    def read(self) -> Vitals:
        """Read all of them."""
        files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        disk, shared = _room(self._folder), _room(_SHARED)
        return Vitals(
            memory=memory(),
            files=open_files(),
            memory_limit=self._memory_limit,
            files_limit=None if files_limit == resource.RLIM_INFINITY else files_limit,
            disk_free=disk[0] if disk else None,
            checkpoint=_size(self._checkpoint),
            shared_free=shared[0] if shared else None,
            shared=shared[1] if shared else None,
            gpu=self._nvml.read() if self._nvml else None,
        )


def memory() -> int | None:
    """Return the bytes that this process and the ones that it began hold for themselves.

    Pages that a forked worker still shares with this process count for both: that is the same at
    every log point, and to tell them apart the system would walk through all of them.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    own = os.getpid()
    try:
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        whole = _private(f"{own}")
    except OSError:
        return None
    for child in children:
        with contextlib.suppress(OSError, IndexError, ValueError):  # it ends just now
            whole += _private(child)
    return whole * page


def _private(process: str) -> int:
    """Return the pages of a process that are in memory and of no file."""
    _, resident, of_files, *_ = Path(f"/proc/{process}/statm").read_text().split()
    return int(resident) - int(of_files)


def open_files() -> int | None:
    """Return how many files this process has open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def memory_limit() -> int | None:
    """Return the bytes of memory that there are, for this container or on this machine."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):
        return min(machine, int(_CGROUP.read_text()))
    return machine


def _room(folder: Path) -> tuple[int, int] | None:
    """Return the bytes that are free on a folder's disk, and all of them."""
    with contextlib.suppress(OSError):
        found = shutil.disk_usage(folder)
        return found.free, found.total
    return None


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0
