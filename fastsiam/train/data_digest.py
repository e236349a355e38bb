"""Digest of the images and augmentations since a run's last log line, over all ranks."""

from __future__ import annotations

from typing import Any

import torch

from fastsiam.distributed import sum_across_ranks
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.views.digest import hex_digest, sum_digests

_HALF = 32


class DataDigest:
    """Running sum of batch digests from one log line to the next.

    Each rank adds its own batches; ``share`` sums over the ranks. All computation is on the host.

    Args:
        start: checkpoint to resume from, with the digest of the steps since its last log line.
    """

    def __init__(self, start: Checkpoint | None) -> None:
        state = {} if start is None else start.seen
        self._local = 0
        self._since = int(state.get("since", 0 if start is None else start.step))
        self._total = int(state.get("digest", "0"), 16)

    def add(self, digest: int) -> None:
        """Add this rank's part of a step's batch."""
        self._local = sum_digests(self._local, digest)

    def share(self) -> None:
        """Sum the digests added since the last call over the ranks; every rank must call this."""
        # In halves, because a sum of 64-bit digests overflows every type that gloo can sum. On the
        # host, to avoid waiting for the device.
        halves = torch.tensor([self._local >> _HALF, self._local % (1 << _HALF)])
        high, low = sum_across_ranks(halves).tolist()
        self._total, self._local = sum_digests(self._total, high << _HALF, low), 0

    def line(self, done: int) -> dict[str, Any]:
        """Return the digest's fields for the log line at step ``done``, and start a new sum.

        Returns:
            ``since``, the number of steps before the first one in the digest;
            ``seen``, the digest as 16 hexadecimal digits.
        """
        fields = {"since": self._since, "seen": hex_digest(self._total)}
        self._since, self._total = done, 0
        return fields

    def state(self) -> dict[str, Any]:
        """Return the sum since the last log line, for a checkpoint; call ``share`` first."""
        assert not self._local
        return {"since": self._since, "digest": hex_digest(self._total)}
