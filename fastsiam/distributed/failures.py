"""Errors of collectives that mean that another rank is gone or late."""

from __future__ import annotations

import torch.distributed as dist

from fastsiam.launched import is_worker

_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "timed out connecting",
    "likely closed",
    "remote process exit",
    "ncclremoteerror",
)
_LATE = ("timed out waiting", "timed out after", "wait timeout after")
"""Parts of the error messages of gloo, NCCL and torch's store."""


def peer_is_gone(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended."""
    return _of_exchange(error, _GONE)


def peer_is_late(error: BaseException) -> bool:
    """Return whether a collective failed because another rank did not arrive in time."""
    return _of_exchange(error, _LATE)


def _of_exchange(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and exchange and any(sign in text for sign in signs)
