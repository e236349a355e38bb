"""What an exchange's error means: another rank is gone, or is late."""

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
"""How gloo, NCCL and the store by which ranks meet say it."""
_OURS = {
    "_agree": "the vote whether to continue",
    "_forward": "BN's statistics",
    "_forward_and_backward": "the gradients",
}
"""What our functions wait for that say more than the collective's name, or call none by it."""


def peer_is_gone(error: BaseException) -> bool:
    """Tell whether an exchange failed because another rank ended, which has said why itself."""
    return _of_exchange(error, _GONE)


def peer_is_late(error: BaseException) -> str:
    """Return what there is to say if an exchange waited too long for another rank, else "".

    It names what was waited for, who did not come, and where that rank is.
    """
    if not _of_exchange(error, _LATE):
        return ""
    function, at = _where(error)
    who = rank_location.missing(function) or "another rank, which did not come in time"
    return (
        f"waited{at} for {who}; look at what the others wrote; if one of them was only slow, train "
        "with a longer --rank-timeout"
    )


def _where(error: BaseException) -> tuple[str, str]:
    """Return the function of ours that waited; and say where it is and what it waited for."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(rank_location.HOME)]
    if not own:
        return "", ""
    called = [x.name for x in frames if x.filename.endswith("distributed_c10d.py")]
    name = own[-1].name
    what = _OURS.get(name) or (called[0] if called else "")
    at = f"{own[-1].filename.removeprefix(rank_location.HOME)}:{own[-1].lineno}"
    return name, f" in {name} ({at}{what and f', {what}'})"


def _of_exchange(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and exchange and any(sign in text for sign in signs)
