"""Where ranks meet: a part of the launcher's store that nobody wrote into before."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_LOOK = 0.02
"""Seconds between two looks at the store, while the ranks come one by one."""
_AT = "fastsiam/meeting"


class RankMissing(dist.DistStoreError):
    """Ranks did not come to the meeting in time.

    Args:
        who: says which.
        seconds: that were waited for them.
    """

    def __init__(self, who: str, seconds: float) -> None:
        super().__init__(f"timed out after {seconds:g} seconds waiting for {who}")
        self.who = who


def meeting_place(rank: int, world: int, *, timeout: timedelta) -> Store:
    """Return the store by which the ranks meet; all of them are there when it returns.

    torch's elastic launcher has one for all its restarts: addresses of ranks that are no more are
    in it under the names of those that took their place, which would call them in vain.

    Raises:
        RankMissing: a rank did not come in time.
    """
    store, *_ = next(rendezvous("env://", rank, world, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"{_AT}/{_agreed(store, rank, world, timeout)}", store)


def _agreed(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Return a name that the ranks of this start have for it, and none of another start.

    Each says a word that nobody knew. Rank 0 gives all the words that it finds a name, and another
    one whenever a word changes: it was of a rank that is no more. A rank accepts the name that its
    own word has. When all of them have, it holds.
    """
    own = uuid.uuid4().hex
    store.set(f"{_AT}/{rank}", own)
    words: list[str] = []
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        if rank == 0 and (found := [_said(store, str(x)) for x in range(world)]) != words:
            words = found
            store.set(f"{_AT}/named", json.dumps([uuid.uuid4().hex, *words]))
        name, *named = json.loads(_said(store, "named") or '[""]')
        if own in named:
            store.set(f"{_AT}/{name}/{rank}", "yes")
            if rank == 0 and not _absent(store, name, world):
                store.set(f"{_AT}/{name}/holds", "yes")
            if _said(store, f"{name}/holds"):
                return str(name)
        time.sleep(_LOOK)
    absent = _absent(store, name, world) if own in named else []
    who = ", ".join(f"rank {x}" for x in absent) or "the others"
    raise RankMissing(f"{who}, before the first step", timeout.total_seconds())


def _absent(store: Store, name: str, world: int) -> list[int]:
    """Return the ranks that have not accepted a name."""
    return [x for x in range(world) if not _said(store, f"{name}/{x}")]


def _said(store: Store, what: str) -> str:
    """Return what the store has under a name, "" for nothing; does not wait."""
    key = f"{_AT}/{what}"
    return store.get(key).decode() if store.check([key]) else ""
