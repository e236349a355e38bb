"""What limits training here, in about two minutes: loading with each pipeline, then training."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from fastsiam.bench.cases import loader, train
from fastsiam.bench.finding import would_fit
from fastsiam.bench.measurements import Record
from fastsiam.bench.session import Session

_FOR_EACH_WORKER = 128
"""Minimum images per repeat and core with views of 224 pixels; more if views are smaller."""


def measure(session: Session) -> list[Record]:
    """Measure loading and training with the baseline and the selected pipelines.

    Without a selection, all pipelines are measured, and the baseline and the fastest one that could
    handle the recipe's data set train.
    """
    config = session.config
    if not session.gpu and not config.images:
        batch = session.loaded_batch
        batches = ceil(_FOR_EACH_WORKER * session.small_view_factor / batch)
        config = replace(config, images=batches * batch * session.workers)
    records = loader.measure(replace(session, config=config))
    if not config.pipelines:
        views = [one for one in records if one.facts.get("what") == "views" and would_fit(one)]
        fastest = max(views, key=lambda one: one.images_per_second, default=None)
        pipelines: Any = (fastest.pipeline,) if fastest else ()
        config = replace(config, pipelines=pipelines)
    return records + train.measure(replace(session, config=config))
