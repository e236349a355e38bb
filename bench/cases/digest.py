"""Cost of the digests for ``fastsiam verify``, compared with a training step."""

from __future__ import annotations

from functools import partial

import numpy as np

from fastsiam.bench.cases.step import build_step
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Build, Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig
from fastsiam.views.digest import batch_digest
from fastsiam.views.draws import draw_views

BATCHES = 4000
"""Batches per repeat; so many because processor time is counted in hundredths of a second."""


def measure(session: Session) -> list[Record]:
    """Measure digests and training steps of the same batch."""
    batch = session.trained_batch
    config = session.train_config(batch)
    builds: dict[str, Build] = {
        "digest": partial(build_digest, augment=config.augment, batch=batch),
        "step": partial(build_step, config=config),
    }
    rows = (
        Row(
            case="digest",
            name=name,
            build=build,
            in_the_clock="digest: of positions and drawn parameters, one batch after the other; "
            "step: forward, backward and optimizer on tensors that are ready",
            config=session.settings(batch=batch, backbone=config.model.backbone),
        )
        for name, build in builds.items()
    )
    records = compare(session, rows)
    for one in records:
        one.facts["cpu_ms_of_a_batch"] = 1e3 * batch * one.cpu_seconds_per_image
    if len(records) == 2:
        digest, step = records
        # Other programs on the machine do not affect processor time. For a step on a GPU, only
        # wall-clock time is meaningful.
        seconds = 1 / step.images_per_second if session.gpu else step.cpu_seconds_per_image
        digest.facts["percent_of_step"] = 100 * digest.cpu_seconds_per_image / seconds
    return records


def build_digest(*, augment: AugmentConfig, batch: int) -> Task:
    """Build a task that digests the draws of a batch many times."""
    index, size = np.random.default_rng(0).permutation(batch), np.full((batch, 2), (375, 500))
    params = draw_views(augment, seed=0, epoch=0, index=index, size=size)

    def run() -> None:
        for _ in range(BATCHES):
            batch_digest(params, index, epoch=0, place=0)

    return Task(run, BATCHES * batch)
