"""What a run does for each batch so that it can be verified: its digest."""

from __future__ import annotations

import numpy as np

from fastsiam.bench.contest import Work
from fastsiam.config import AugmentConfig
from fastsiam.views.digest import seen_in
from fastsiam.views.draws import draw_views

BATCHES = 4000
"""Of a repeat: processor time is counted in hundredths of a second."""


def build_digest(*, augment: AugmentConfig, batch: int) -> dict[str, Work]:
    """Digest what is drawn for a batch, again and again."""
    index, size = np.random.default_rng(0).permutation(batch), np.full((batch, 2), (375, 500))
    params = draw_views(augment, seed=0, epoch=0, index=index, size=size)

    def run() -> None:
        for _ in range(BATCHES):
            seen_in(params, index, epoch=0, place=0)

    return {"digest": Work(run, BATCHES * batch)}
