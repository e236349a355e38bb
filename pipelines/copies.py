"""Copies from the host to a GPU, on a stream of their own beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies to a device, None for the CPU, where nothing runs beside."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def take_over(tensors: Iterable[Tensor], copied: torch.cuda.Event | None) -> None:
    """Let the current stream read what another stream copies, without the host waiting.

    Args:
        tensors: made on the other stream. Their memory is used again when the current stream, too,
            has done what is asked of it by the time that they are let go.
        copied: when they are whole; None if they are.
    """
    if copied is None:
        return
    for tensor in tensors:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(copied)
        tensor.record_stream(stream)
