"""Numerics of a run: precision, memory format, torch's global options and finite checks."""

from __future__ import annotations

import contextlib
import ctypes
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastsiam.collectives import from_all, minimum_across_ranks
from fastsiam.config import Precision, TrainConfig
from fastsiam.errors import DeviceError

_TYPES: dict[Precision, torch.dtype] = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
"""Dtype of each precision. If "auto" differs between ranks, the first of their choices in this
order is the one that all ranks support."""


def autocast_type(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the autocast dtype of a precision.

    On a GPU, "auto" is bf16 if the hardware supports it, else fp16. On a CPU, it is bf16 with AMX,
    else fp32: with AVX-512 alone, bf16 is no faster than fp32, and casts take extra time.
    """
    if precision != "auto":
        return _TYPES[precision]
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """Return a precision that all ranks support, on any mix of hardware; every rank calls this."""
    dtype = autocast_type(precision, device)
    names = from_all(next(name for name, value in _TYPES.items() if value == dtype))
    return next(name for name in _TYPES if name in names)


def check_precision(precision: str, device: str) -> None:
    """Raise ``DeviceError`` if ``--device`` does not support ``--precision``."""
    if precision == "fp16" and (device == "cpu" or not torch.cuda.is_available()):
        raise DeviceError("--precision fp16 needs a GPU; a new run can use bf16 or fp32 on the CPU")


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return an autocast context for a dtype; it does nothing for float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def with_resolved_precision(
    config: TrainConfig, device: torch.device, *, began_with: TrainConfig | None = None
) -> TrainConfig:
    """Resolve the precision "auto"; a resumed run keeps the precision of its checkpoint.

    Every rank must call this, and gets the same result. ``began_with``: the checkpoint's settings.
    """
    precision = config.numerics.precision
    saved_precision = began_with.numerics.precision if began_with else "auto"
    # On a CPU, a checkpoint's fp16 would fail a later check.
    if precision == "auto" and (saved_precision != "fp16" or device.type == "cuda"):
        precision = saved_precision
    precision = resolve_precision(precision, device)
    return replace(config, numerics=replace(config.numerics, precision=precision))


def memory_format_of(config: TrainConfig) -> torch.memory_format:
    """Return the memory format of images, activations and weights."""
    return torch.channels_last if config.numerics.channels_last else torch.contiguous_format


def use_numerics(config: TrainConfig, device: torch.device) -> None:
    """Set the global options of torch and glibc in this process."""
    tf32 = config.numerics.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    if device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed tensors; other C libraries are left unchanged.

    By default glibc maps new memory for every large tensor in every step. The operating system
    zeroes each page, which takes 10% of a small network's step.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


class FiniteCheck:
    """Detector of the first step with a non-finite value, without device synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), math.inf, device=device, dtype=torch.float64)

    def note(self, step: int, loss: Tensor) -> None:
        """Check the loss of a step; does not wait for the device."""
        self._note(step, torch.isfinite(loss))

    def note_weights(self, step: int, module: nn.Module) -> None:
        """Check all parameters after a step; does not wait for the device."""
        self._note(step, torch.stack([p.isfinite().all() for p in module.parameters()]).all())

    def _note(self, step: int, good: Tensor) -> None:
        bad_step = torch.where(good, math.inf, self._first.new_full((), step))
        self._first = torch.minimum(self._first, bad_step)

    def verdict(self) -> int | None:
        """Return the first bad step of any rank, or None; every rank must call this and waits."""
        first = minimum_across_ranks(self._first).item()
        return None if math.isinf(first) else int(first)
