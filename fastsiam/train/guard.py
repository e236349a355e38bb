"""Detection of collapse from the metrics in ``metrics``; does not import torch."""

from __future__ import annotations

import math

from fastsiam.errors import TrainingError

SPREAD = 0.5
"""A z_std below this fraction of the usual value counts as collapse; see ``lowest_spread``."""
UNTRAINED = 0.2
"""Lower bound of the z_std of untrained ResNets with any head; MoCo's is lowest, 0.42 to 0.57."""
RANK = 4.0
"""An effective rank below this counts as collapse, except with tiny batches or few dimensions."""


def lowest_spread(first: float, *, centred: bool) -> float:
    """Return the z_std below which a representation counts as collapsed: half its usual value.

    The usual value is 1 if BN centres the embeddings (``centred``). Otherwise it is ``first``: the
    z_std of the untrained network, which may be below 1, or of the first log point if unknown.
    """
    return SPREAD * (1.0 if centred else min(max(first, UNTRAINED), 1.0))


def is_collapsed(
    spread: float, rank: float, *, batch: int, dim: float = math.inf, bound: float = SPREAD
) -> bool:
    """Return whether a representation is collapsed.

    Args:
        spread: its ``z_std``.
        rank: its effective rank.
        batch: number of images that both were measured on.
        dim: its number of dimensions, which limits the rank like the number of images.
        bound: smallest healthy ``z_std``, from ``lowest_spread``.
    """
    return not (spread >= bound and rank >= min(RANK, batch / 4, dim / 2))


class CollapseGuard:
    """Check of the metrics at each log point; warns or stops when the representation collapses.

    Args:
        on_collapse: "warn" or "stop".
        batch: number of images that the metrics are measured on.
        dim: dimensions of the representation.
        centred: whether BN centres the embeddings.
        first: z_std of the untrained network; None if it is unknown.
    """

    ADVICE = (
        "usual causes: the stop-gradient is missing, the learning rate is too high for the batch, "
        "BN sees too few samples, the augmentation is too weak, or fp16 overflow"
    )

    def __init__(
        self,
        on_collapse: str,
        *,
        batch: int,
        dim: float = math.inf,
        centred: bool = True,
        first: float | None = None,
    ) -> None:
        self._stops = on_collapse == "stop"
        self._batch, self._dim, self._centred = batch, dim, centred
        self.first = first
        """z_std that later values are compared with; None until the first is known."""
        self._warned = False

    def check(self, step: int, spread: float, rank: float) -> str | None:
        """Return a warning at the first log point of each collapse, else None.

        Raises:
            TrainingError: on collapse, if ``on_collapse`` is "stop".
        """
        if self.first is None:
            self.first = spread
        bound = lowest_spread(self.first, centred=self._centred)
        if not is_collapsed(spread, rank, batch=self._batch, dim=self._dim, bound=bound):
            self._warned = False
            return None
        message = (
            f"the representation collapsed at step {step:,}: std {spread:.3f} "
            f"(healthy: near {bound / SPREAD:.2g}), effective rank {rank:.1f}; {self.ADVICE}"
        )
        if self._stops:
            raise TrainingError(message)
        if self._warned:
            return None
        self._warned = True
        return message
