"""Measurement of time, memory and GPU utilisation of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from fastsiam.bench.timing import Sample


def clocked(run: Callable[[], object]) -> Sample:
    """Do a piece of work of this process and time it, to the end of what it asked of a GPU."""
    wait_for_gpu()
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    wait_for_gpu()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return Sample(wall, cpu, host_memory())


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children, dead and alive."""
    now = os.times()
    ended = now.user + now.system + now.children_user + now.children_system
    return ended + sum(_cpu_of(child) for child in children(os.getpid()))


def host_memory() -> int:
    """Return the bytes that this process and its children hold, shared ones counted once.

    What the system caches of mapped files is not counted: it goes when memory is short.
    """
    return sum(map(_private_memory, (os.getpid(), *children(os.getpid()))))


def gpu_memory() -> int:
    """Return the bytes in use on this machine's GPUs, by all processes; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return sum(int(line) for line in done.stdout.split() if line.isdigit()) * 2**20


class GpuWatch:
    """Samples how busy the GPUs' units are, by nvidia-smi; nothing without it."""

    UNITS: ClassVar[dict[str, str]] = {"gpu_busy": "gpu", "jpeg_engine_busy": "jpeg"}
    """Names of the shares, and of nvidia-smi's units."""
    MILLISECONDS = 100
    """Between two samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuWatch:
        program = shutil.which("nvidia-smi")
        if program is not None:
            asked = ",".join(f"utilization.{unit}" for unit in self.UNITS.values())
            command = [program, f"--query-gpu=timestamp,{asked}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [*command, "-lms", str(self.MILLISECONDS)],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._reader.join()
            self._process.wait()
            self._process = None

    def shares(self, windows: Iterable[tuple[float, float]]) -> dict[str, float]:
        """Return the mean share of each unit over GPUs and samples, where it is known.

        Args:
            windows: from when to when, by ``time.time``.
        """
        within = [
            shares
            for began, ended in windows
            for at, shares in self._samples
            if began <= at <= ended
        ]
        found: dict[str, float] = {}
        for name, column in zip(self.UNITS, zip(*within, strict=True), strict=False):
            known = [share for share in column if not math.isnan(share)]
            found |= {name: statistics.fmean(known)} if known else {}
        return found

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            at, *cells = line.split(",")
            with contextlib.suppress(ValueError):  # the last line may be cut
                when = datetime.datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
                if len(cells) == len(self.UNITS):
                    self._samples.append((when, [_share(cell) for cell in cells]))


def _share(percent: str) -> float:
    """Return a share of 0 to 1; nan for a unit that the driver does not report."""
    return int(percent) / 100 if percent.strip().isdigit() else math.nan


def give_back_gpu_memory() -> None:
    """Give back what torch's allocator keeps for later, if this process uses a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget(paths: Iterable[Path]) -> float:
    """Ask the system to drop files from its cache.

    Returns:
        The share of their pages that is still there: no measurement is cold unless it is near 0.
    """
    pages = kept = 0
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages can go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cached, of = _cached(file.fileno())
            pages, kept = pages + of, kept + cached
    return kept / max(1, pages)


def children(process: int) -> list[int]:
    """Return the numbers of a process's children, and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found + [grandchild for child in found for grandchild in children(child)]


def wait_for_gpu() -> None:
    """Wait until all that this process asked of a GPU is done."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _cpu_of(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _private_memory(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines[1:])}
    return 1024 * (int(sizes.get("Pss_Anon", 0)) + int(sizes.get("Pss_Shmem", 0)))


def _cached(file: int) -> tuple[int, int]:
    """Return how many of a file's pages the system caches, and how many it has."""
    size = os.fstat(file).st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    here = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(size)
        if libc.mincore(*arguments, here):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(page & 1 for page in here), pages
