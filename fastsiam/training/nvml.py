"""Why a GPU runs below its clock: asked of NVIDIA's management library, which the driver brings.

``torch.cuda`` asks the same library through a package that may not be installed, and not for this.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import torch

_REASONS = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of ``nvmlDeviceGetCurrentClocksThrottleReasons`` that say that something is wrong. A GPU
that is idle, or busy up to the power that it may take, is below its clock as well."""
_SM_CLOCK = 1


@dataclass(frozen=True, slots=True)
class GpuClock:
    """How fast a GPU runs just now."""

    throttles: tuple[str, ...]
    """Why it is slowed down; empty if it is not."""
    mhz: int
    most_mhz: int
    celsius: int

    def __str__(self) -> str:
        """Say it for people."""
        return f"{self.mhz:,} of {self.most_mhz:,} MHz at {self.celsius} C"


class Nvml:
    """One GPU's clock.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        self._gpu = ctypes.c_void_p()
        with contextlib.suppress(OSError, AttributeError, RuntimeError, AssertionError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if library.nvmlInit_v2():
                return
            if not library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._gpu)):
                self._library = library

    def read(self) -> GpuClock | None:
        """Return its state; None where nobody can tell."""
        if self._library is None:
            return None
        with contextlib.suppress(AttributeError):  # a driver without one of the functions
            return self._read()
        return None

    def _read(self) -> GpuClock | None:
        reasons = ctypes.c_ulonglong()
        mhz, most, celsius = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        refused = (
            self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(reasons))
            or self._ask("nvmlDeviceGetClockInfo", _SM_CLOCK, ctypes.byref(mhz))
            or self._ask("nvmlDeviceGetMaxClockInfo", _SM_CLOCK, ctypes.byref(most))
            or self._ask("nvmlDeviceGetTemperature", 0, ctypes.byref(celsius))
        )
        if refused:
            return None
        why = tuple(name for bit, name in _REASONS.items() if reasons.value & bit)
        return GpuClock(why, mhz.value, most.value, celsius.value)

    def _ask(self, name: str, *arguments: Any) -> int:
        status: int = getattr(self._library, name)(self._gpu, *arguments)
        return status
