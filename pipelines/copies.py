"""Copies from the host to a GPU, on a stream of their own beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies to a GPU, None for the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def take_over(tensors: Iterable[Tensor], copied: torch.cuda.Event | None) -> None:
    """Let the current stream read what another stream copies, without making the host wait.

    Args:
        tensors: made on the other stream. Once they are freed, their memory is reused only after
            the work that is then queued on the current stream.
        copied: event after which they are complete; None if they are complete.
    """
    if copied is None:
        return
    for tensor in tensors:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(copied)
        tensor.record_stream(stream)
