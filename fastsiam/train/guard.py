"""Who watches for collapse, by the measures of ``collapse``; it needs no torch itself."""

from __future__ import annotations

from fastsiam.errors import TrainingError

SPREAD = 0.5
"""z_std below this share of the usual is a collapse in progress; see ``lowest_spread``."""
UNTRAINED = 0.2
"""Untrained ResNets' z_std is above this, whatever the head: MoCo's is lowest, .42 to .57."""
FLAT = 0.5
"""More of the first batch's pixels having their image's most frequent value is worth a warning;
see ``collapse.flat_share``."""
RANK = 4.0
"""Fewer dimensions than this carry nothing, whatever their spread; tiny batches have fewer."""


def lowest_spread(first: float, *, centred: bool) -> float:
    """Return the z_std below which a representation collapses.

    The usual is 1, if BN centres the embeddings. That of others is the untrained network's, which
    may be below 1.

    Args:
        first: z_std of the untrained network, or at the first log point where that is unknown.
        centred: whether BN centres the embeddings.
    """
    return SPREAD * (1.0 if centred else min(max(first, UNTRAINED), 1.0))


def is_collapsed(spread: float, rank: float, *, batch: int, bound: float = SPREAD) -> bool:
    """Tell whether a representation is collapsed.

    Args:
        spread: its ``z_std``.
        rank: its effective rank.
        batch: images of the batch that these were measured on.
        bound: ``lowest_spread``.
    """
    return not (spread >= bound and rank >= min(RANK, batch / 4))


class CollapseGuard:
    """Watches the measures of the log points and speaks up when the representation collapses.

    Args:
        on_collapse: warn or stop.
        batch: images of a batch.
        centred: whether BN centres the embeddings.
    """

    ADVICE = (
        "usual causes: the stop-gradient is missing, the learning rate is too high for the batch, "
        "BN sees too few samples, the augmentation is too weak, or fp16 overflow"
    )

    def __init__(self, on_collapse: str, *, batch: int, centred: bool = True) -> None:
        self._stops = on_collapse == "stop"
        self._batch = batch
        self._centred = centred
        self._first: float | None = None
        self._warned = False
        self._advice = self.ADVICE

    def check_images(self, flat_share: float) -> str | None:
        """Return a warning if images are constant or saturated; it then leads the advice, too."""
        if flat_share <= FLAT:
            return None
        warning = (
            f"{flat_share:.0%} of the pixels of the first batch have their image's most frequent "
            "value: the images are constant, saturated, or have a plain background; look at them "
            "with `fastsiam views --data DIR`"
        )
        self._advice = f"{warning}; other {self.ADVICE}"
        return warning

    def begin(self, spread: float) -> None:
        """Take the z_std of the untrained network, by which later ones are judged."""
        self._first = spread

    def check(self, step: int, spread: float, rank: float) -> str | None:
        """Return a warning, once for each episode.

        Raises:
            TrainingError: on collapse, if the run shall stop then.
        """
        if self._first is None:
            self._first = spread
        bound = lowest_spread(self._first, centred=self._centred)
        if not is_collapsed(spread, rank, batch=self._batch, bound=bound):
            self._warned = False
            return None
        message = (
            f"the representation collapses at step {step:,}: std {spread:.3f} "
            f"(healthy: near {bound / SPREAD:.2g}), effective rank {rank:.1f}; {self._advice}"
        )
        if self._stops:
            raise TrainingError(message)
        if self._warned:
            return None
        self._warned = True
        return message
