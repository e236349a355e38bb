"""Warnings about the machine: a full disk, little memory, a slower loader, a throttled GPU."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastsiam.console import Console, size
from fastsiam.environment import host_memory
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import MetricsLog

_WINDOW = 40
"""Number of log points that warnings about the loader or the GPU are based on."""
_WAIT_GROWTH = 0.1
"""Growth of the data wait that is worth a warning, as a share of a step's time."""
_LOW_MEMORY = 0.05
"""Share of free host memory below which a warning is printed."""
_CHECKPOINTS = 2
"""Checkpoints that must fit on the disk; a new one is written before the oldest is deleted."""
_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's throttle reasons that call for action; others mean idle or at the power limit."""


class Gauges:
    """Checks the machine at the log points of a run, on rank 0, and warns once of each problem.

    Args:
        log: receives the warnings.
        console: shows the warnings.
        device: the device that trains.
    """

    def __init__(self, log: MetricsLog, *, console: Console, device: torch.device) -> None:
        self._log, self._console = log, console
        self._gpu = Gpu(device) if device.type == "cuda" else None
        self._usual_wait: float | None = None
        self._waits: deque[float] = deque(maxlen=_WINDOW)
        self._throttles: deque[tuple[str, ...]] = deque(maxlen=_WINDOW)
        self._warned: set[str] = set()

    def check(self, values: Mapping[str, Any]) -> None:
        """Check everything; takes a fraction of a millisecond.

        Args:
            values: the log point's step, epoch and data_wait.
        """
        warnings = {
            "disk": _disk_warning(self._log.path.parent),
            "memory": _memory_warning(),
            "data_wait": self._wait_warning(values["data_wait"]),
            "gpu": self._gpu_warning(),
        }
        for name, text in warnings.items():
            if text and name not in self._warned:
                self._warned.add(name)
                at = {"step": values["step"], "epoch": values["epoch"]}
                self._log.write("alarm", {**at, "name": name, "text": text})
                self._console.warn(text)

    def _wait_warning(self, wait: float) -> str:
        self._waits.append(wait)
        if len(self._waits) < _WINDOW:
            return ""
        now = statistics.median(self._waits)
        if self._usual_wait is None:
            self._usual_wait = now
        if now - self._usual_wait < _WAIT_GROWTH:
            return ""
        return (
            f"data wait grew from {self._usual_wait:.0%} to {now:.0%} (medians of {_WINDOW} log "
            "points): the loader became slower"
        )

    def _gpu_warning(self) -> str:
        clock = self._gpu.clock() if self._gpu else None
        if clock is None:
            return ""
        self._throttles.append(clock.throttles)
        throttled = [reasons for reasons in self._throttles if reasons]
        if len(self._throttles) < _WINDOW or len(throttled) < _WINDOW / 2:
            return ""
        names = ", ".join(sorted({name for reasons in throttled for name in reasons}))
        return (
            f"the GPU was throttled ({names}) at {len(throttled)} of the last {_WINDOW} log "
            f"points: {clock.mhz:,} of {clock.max_mhz:,} MHz at {clock.celsius} C"
        )


def _disk_warning(run: Path) -> str:
    with contextlib.suppress(OSError):  # no checkpoint yet
        checkpoint = checkpoints.last(run).stat().st_size
        free = shutil.disk_usage(run).free
        if free < _CHECKPOINTS * checkpoint:
            return (
                f"the disk of {run} has {size(free)} left; a checkpoint takes {size(checkpoint)}, "
                "and the previous one is deleted only after the new one is written"
            )
    return ""


def _memory_warning() -> str:
    free, total = host_memory()
    if free >= _LOW_MEMORY * total:
        return ""
    return (
        f"the host has {size(free)} of {size(total)} memory left; when it runs out, the system "
        "kills processes: lower --workers or --prefetch, or stop other programs"
    )


class GpuClock(NamedTuple):
    """Clock frequency, temperature and throttling of a GPU."""

    throttles: tuple[str, ...]
    """Reasons of throttling; empty if the GPU is not throttled."""
    mhz: int
    max_mhz: int
    celsius: int


class Gpu:
    """Reader of one GPU's clock, through NVIDIA's management library (NVML).

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml, self._handle = pynvml, None
        with contextlib.suppress(pynvml.NVMLError):  # no library, or a part of a GPU (MIG)
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def clock(self) -> GpuClock | None:
        """Return the clock; None if NVML cannot read it."""
        nvml, gpu = self._nvml, self._handle
        if gpu is None:
            return None
        with contextlib.suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            return GpuClock(
                throttles=tuple(name for bit, name in _THROTTLES.items() if reasons & bit),
                mhz=nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
                max_mhz=nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
                celsius=nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            )
        return None
