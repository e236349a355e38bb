"""Measurement of time, memory and GPU utilisation of a piece of work."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import psutil

from fastsiam.bench.timing import Sample


def clocked(run: Callable[[], object]) -> Sample:
    """Run a function of this process and time it until its GPU work has finished."""
    wait_for_gpu()
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    wait_for_gpu()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return Sample(wall, cpu, host_memory())


def cpu_seconds() -> float:
    """Return the processor seconds of this process and its children, dead and alive."""
    total = 0.0
    for process in (psutil.Process(), *children()):
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def children() -> list[psutil.Process]:
    """Return this process's children, and theirs."""
    return psutil.Process().children(recursive=True)


def host_memory() -> int:
    """Return the bytes that this process and its children hold, shared ones counted once.

    Pages that the system caches of mapped files are left out: it drops them when memory is short.
    """
    total = 0
    for process in (psutil.Process(), *children()):
        with contextlib.suppress(OSError):  # it may end meanwhile
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += 1024 * int(line.split()[1])
    return total


def gpu_memory() -> int:
    """Return the bytes in use on this machine's GPUs, by all processes; 0 without a GPU."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return sum(int(line) for line in done.stdout.split() if line.isdigit()) * 2**20


def wait_for_gpu() -> None:
    """Wait until all GPU work of this process has finished."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def empty_gpu_cache() -> None:
    """Give back the GPU memory that torch's allocator keeps for later."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class GpuWatch:
    """Samples how busy the GPUs' units are, by nvidia-smi, while inside; without it nothing."""

    UNITS: ClassVar[dict[str, str]] = {"gpu_busy": "gpu", "jpeg_engine_busy": "jpeg"}
    """Names of the shares, and of nvidia-smi's units."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[str] = []

    def __enter__(self) -> GpuWatch:
        if program := shutil.which("nvidia-smi"):
            query = ",".join(f"utilization.{unit}" for unit in self.UNITS.values())
            command = [program, f"--query-gpu=timestamp,{query}", "--format=csv,noheader,nounits"]
            self._output = tempfile.TemporaryFile("w+")
            self._process = subprocess.Popen(
                [*command, "-lms", "100"], stdout=self._output, stderr=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._output.seek(0)
            self._lines = self._output.read().splitlines()
            self._output.close()

    def shares(self, windows: Iterable[tuple[float, float]]) -> dict[str, float]:
        """Return the mean share of each unit that the driver reports, over GPUs and samples.

        Args:
            windows: start and end of each, by ``time.time``.
        """
        windows, samples = list(windows), dict[str, list[float]]()
        for line in self._lines:
            at, *cells = line.split(", ")
            with contextlib.suppress(ValueError):  # the last line may be cut
                when = datetime.datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
                if any(began <= when <= ended for began, ended in windows):
                    for name, cell in zip(self.UNITS, cells, strict=True):
                        if cell.isdigit():  # else the driver does not report it
                            samples.setdefault(name, []).append(int(cell) / 100)
        return {name: statistics.fmean(shares) for name, shares in samples.items()}
