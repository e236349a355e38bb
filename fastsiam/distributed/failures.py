"""What an exchange's error means: another rank is gone, or is late."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch.distributed as dist

from .place import is_worker

_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "likely closed",
    "remote process exit",
    "ncclremoteerror",
)
_LATE = ("timed out waiting", "timed out after", "wait timeout after")
"""How gloo, NCCL and the store by which ranks meet say it."""
_HOME = str(Path(__file__).parents[1]) + os.sep


def peer_is_gone(error: BaseException) -> bool:
    """Tell whether an exchange failed because another rank ended, which has said why itself."""
    return _of_exchange(error, _GONE)


def peer_is_late(error: BaseException) -> str:
    """Return what there is to say if an exchange waited too long for another rank, else ""."""
    if not _of_exchange(error, _LATE):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_HOME)]
    at = ""
    if own:
        at = f" in {own[-1].name} ({own[-1].filename.removeprefix(_HOME)}:{own[-1].lineno})"
    return (
        f"waited{at} for another rank, which did not come in time: look at what the others wrote; "
        "if one of them was only slow, train with a longer --rank-timeout"
    )


def _of_exchange(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and exchange and any(sign in text for sign in signs)
