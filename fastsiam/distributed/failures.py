"""Errors of collectives that mean that another rank is gone or late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

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


class _Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def closing_unless_lost(used: _Closable) -> Iterator[None]:
    """Close what the block used, unless it ends because another rank is gone or late.

    Then this process exits at once. To free memory of a GPU would be to wait for kernels of NCCL,
    and those wait for the other rank until NCCL aborts the process.
    """
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        if ending is None or not (peer_is_gone(ending) or peer_is_late(ending)):
            used.close()


def _of_exchange(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    exchange = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
    return is_worker() and exchange and any(sign in text for sign in signs)
