"""Measurement of time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fastsiam.bench.measurements import Sample


def time_task(run: Callable[[], object]) -> Sample:
    """Run a function in this process and time it until its GPU work has finished."""
    wait_for_gpu()
    # Finding the children takes processor time of this process: its clock starts after that.
    of_children = _child_seconds()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    wait_for_gpu()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu + _child_seconds() - of_children, host_memory())


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children, including ended ones.

    Those of this process are exact, those of its children are in steps of 0.01 s.
    """
    return time.process_time() + _child_seconds()


def _child_seconds() -> float:
    """Return the processor seconds of this process's children, including ended ones."""
    own = psutil.Process().cpu_times()
    total: float = own.children_user + own.children_system
    for process in children():
        with contextlib.suppress(psutil.Error):  # it may end in the meantime
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def children() -> list[psutil.Process]:
    """Return all descendants of this process."""
    processes: list[psutil.Process] = psutil.Process().children(recursive=True)
    return processes


def host_memory() -> int:
    """Return the bytes used by this process and its children; memory that they share counts once.

    Memory that this process shares with the process it was forked from counts in full, so the
    figure does not depend on how many others share it. The page cache of mapped files is left out:
    the kernel drops it when memory is short.
    """
    parent, *descendants = (_memory(process.pid) for process in (psutil.Process(), *children()))
    total = parent.get("Anonymous", 0) + parent.get("Pss_Shmem", 0)
    return total + sum(max(x.get("Private_Dirty", 0), x.get("Pss_Shmem", 0)) for x in descendants)


def _memory(process: int) -> dict[str, int]:
    """Read a process's memory by kind, in bytes; empty if it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        return {name.rstrip(":"): 1024 * int(size) for name, size, _ in map(str.split, lines)}
    return {}


def gpu_memory() -> int:
    """Return the bytes in use on this machine's GPUs, by all processes; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    result = subprocess.run(command, capture_output=True, text=True)
    return sum(int(line) for line in result.stdout.split() if line.isdigit()) * 2**20


def wait_for_gpu() -> None:
    """Wait until all GPU work of this process has finished."""
    if cuda := _cuda():
        cuda.synchronize()


def empty_gpu_cache() -> None:
    """Release the GPU memory that torch's allocator caches."""
    if cuda := _cuda():
        cuda.empty_cache()


def _cuda() -> Any:
    """Return ``torch.cuda`` if this process uses a GPU, else None; never imports torch."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def drop_from_cache(paths: Iterable[Path]) -> float:
    """Ask the kernel to drop files from the page cache.

    Returns:
        The share of their pages that is still cached: a measurement is cold only if it is near 0.
    """
    cached, pages = 0, 0
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if size := path.stat().st_size:
                page_flags = _cached_pages(file.fileno(), size)
                cached, pages = cached + sum(page_flags), pages + len(page_flags)
    return cached / max(1, pages)


def _cached_pages(file: int, size: int) -> list[int]:
    """Return 1 for each page of a file that is in the page cache, and 0 for each other page."""
    mapped = np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, vector = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
    if libc.mincore(address, ctypes.c_size_t(size), vector):
        raise OSError(ctypes.get_errno(), "mincore")
    cached: list[int] = (pages & 1).tolist()
    return cached
