"""What a run was trained on since its last log line, as a digest over all ranks."""

from __future__ import annotations

from typing import Any

import torch

from fastsiam.checkpoint import Checkpoint
from fastsiam.distributed import sum_across_ranks
from fastsiam.views.digest import added, written

_HALF = 32


class Seen:
    """Adds up the digests of a run's batches from one log line to the next.

    Each rank adds its own; ``share`` adds up the ranks', between steps at which all of them meet
    anyway. Nothing here touches the device.

    Args:
        start: what the run goes on from, with what its next line is to tell of already.
        world: number of ranks.
    """

    def __init__(self, start: Checkpoint | None, *, world: int) -> None:
        kept = {} if start is None else start.seen
        self._world, self._own = world, 0
        self._since = int(kept.get("since", 0 if start is None else start.step))
        self._shared = int(kept.get("digest", "0"), 16)

    def add(self, digest: int) -> None:
        """Add this rank's part of a step's batch."""
        self._own = added(self._own, digest)

    def share(self) -> None:
        """Add up what the ranks added since the last time; every rank calls it, and waits."""
        if self._world > 1:
            # In halves: the sum of whole digests would not fit in any number that gloo adds up.
            # And on the host, where nobody waits for a device.
            halves = torch.tensor([self._own >> _HALF, self._own % (1 << _HALF)])
            high, low = sum_across_ranks(halves).tolist()
            self._own = added(high << _HALF, low)
        self._shared, self._own = added(self._shared, self._own), 0

    def line(self, done: int) -> dict[str, Any]:
        """Return what a log line after so many steps says, and begin with the next.

        Returns:
            ``since``, the number of steps after which the stretch begins that the line is about;
            ``seen``, the digest of what was trained on from there, 16 hexadecimal digits.
        """
        told = {"since": self._since, "seen": written(self._shared)}
        self._since, self._shared = done, 0
        return told

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: of steps that no line tells of yet; after ``share``."""
        assert not self._own
        return {"since": self._since, "digest": written(self._shared)}
