"""Errors of collectives that mean that another rank is gone or late."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from fastsiam.launched import is_worker

from . import rank_location

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
_PURPOSES = {
    "_agree": "the vote whether to continue",
    "_forward": "BN's statistics",
    "_forward_and_backward": "the gradients",
}
"""What functions of fastsiam wait for, where the name of the collective says less."""


def peer_is_gone(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended."""
    return _of_exchange(error, _GONE)


def peer_is_late(error: BaseException) -> str:
    """Return a message if a collective timed out, else "".

    It names what this rank waited for, which rank did not arrive, and where that rank is.
    """
    if not _of_exchange(error, _LATE):
        return ""
    function, at = _where(error)
    who = rank_location.missing(function) or "another rank, which did not arrive in time"
    return (
        f"waited{at} for {who}; see the messages of the other ranks; if one was only slow, pass a "
        "longer --rank-timeout"
    )


def _where(error: BaseException) -> tuple[str, str]:
    """Return the function of fastsiam that waited, and a text with its line and the collective."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(rank_location.HOME)]
    if not own:
        return "", ""
    called = [x.name for x in frames if x.filename.endswith("distributed_c10d.py")]
    name = own[-1].name
    what = _PURPOSES.get(name) or (called[0] if called else "")
    at = f"{own[-1].filename.removeprefix(rank_location.HOME)}:{own[-1].lineno}"
    return name, f" in {name} ({at}{what and f', {what}'})"


def _of_exchange(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and exchange and any(sign in text for sign in signs)
