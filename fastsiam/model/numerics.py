"""What a run computes in: precision, memory formats, torch's switches; and whether it is finite."""

from __future__ import annotations

import contextlib
import ctypes
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastsiam.config import Precision, TrainConfig
from fastsiam.distributed import Place, minimum_across_ranks

_TYPES: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def autocast_type(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the type that a precision stands for.

    "auto" is on a GPU bf16 if it computes in that, else fp16; on a CPU bf16 if it has AMX, else
    fp32. AVX-512 alone multiplies bf16 no faster than fp32, and casting comes on top: without AMX,
    a step of a ResNet was slower in bf16.
    """
    if precision != "auto":
        return _TYPES[precision]
    if device.type == "cuda":
        exact = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if exact else torch.float16
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context in which a network computes in a type; float32 leaves all as it is."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def with_settled_precision(
    config: TrainConfig, device: torch.device, *, began_with: TrainConfig | None = None
) -> TrainConfig:
    """Write down what "auto" means here; a run that continues keeps what it began with.

    Args:
        config: the settings.
        device: of this rank.
        began_with: the settings of the checkpoint that training continues from.
    """
    precision = config.numerics.precision
    own = began_with.numerics.precision if began_with else "auto"
    if precision == "auto" and (own != "fp16" or device.type == "cuda"):  # else it is refused
        precision = own
    dtype = autocast_type(precision, device)
    name = next(name for name, known in _TYPES.items() if known == dtype)
    return replace(config, numerics=replace(config.numerics, precision=name))


def memory_format_of(config: TrainConfig) -> torch.memory_format:
    """Return the layout of images, activations and weights."""
    return torch.channels_last if config.numerics.channels_last else torch.contiguous_format


def use_numerics(config: TrainConfig, place: Place) -> None:
    """Set the switches of this process."""
    tf32 = config.numerics.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    if place.device.type == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Have this process keep the memory of freed tensors for the next ones.

    By default glibc maps each large tensor of each step anew, and the system clears every page of
    it: a tenth of a step of a small network. With another C library nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


class FiniteCheck:
    """Remembers the first step that left a number that is not finite, without asking the device."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), math.inf, device=device, dtype=torch.float64)

    def note(self, step: int, loss: Tensor) -> None:
        """Look at one step's loss; does not wait for it."""
        self._note(step, torch.isfinite(loss))

    def note_weights(self, step: int, module: nn.Module) -> None:
        """Look at all parameters after a step; does not wait for it."""
        self._note(step, torch.stack([p.isfinite().all() for p in module.parameters()]).all())

    def _note(self, step: int, good: Tensor) -> None:
        at = torch.where(good, math.inf, float(step))
        self._first = torch.minimum(self._first, at.to(self._first.dtype))

    def verdict(self) -> int | None:
        """Return the first bad step of any rank, if any; every rank asks. Waits for the device."""
        first = minimum_across_ranks(self._first).item()
        return None if math.isinf(first) else int(first)
