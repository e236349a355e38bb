"""How fast training is end to end, fed by each pipeline, beside ready tensors: the ceiling."""

from __future__ import annotations

from dataclasses import replace

from fastsiam.bench.config import ORIGINAL
from fastsiam.bench.contestants.train import build_fed
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig
from fastsiam.pipelines.backends import BACKENDS, BASELINE, CEILING


def measure(session: Session) -> list[Record]:
    """Measure each pipeline; one that reads .beton files on each form of the images."""
    batch = session.trained_batch
    images = session.images(batch, at_least=4)
    config = session.train_config(batch)
    with session.contest() as contest:
        ready = DataConfig(pipeline=CEILING)
        contest.enter(CEILING, build_fed, config=replace(config, data=ready))
        for pipeline in session.config.pipeline_names:
            forms = session.forms(pipeline) if BACKENDS[pipeline].needs_beton else []
            for form in forms or [ORIGINAL]:
                name = pipeline if form == "original" else f"{pipeline}, {form}"
                data = session.data(images, pipeline, form)
                contest.enter(name, build_fed, config=replace(config, data=data))
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {name: contest.facts(name, work) for name, work in timings}
    baseline, ceiling = (timings.get((name, "train")) for name in (BASELINE, CEILING))
    used = {name: one.pop("settings", {}) for name, one in facts.items()}
    return [
        record(
            "train",
            name,
            timing,
            torchvision=baseline,
            ceiling=("ready tensors", ceiling) if ceiling else None,
            pipeline=name.partition(",")[0],
            gpu_bytes=contenders[name].gpu,
            facts=facts[name],
            in_the_clock="steps in the middle of an epoch: waiting for the batch, forward, "
            "backward, optimizer",
            config=session.settings(
                batch=batch,
                backbone=session.config.train.model.backbone,
                workers=session.workers,
                data=images.about,
                **used[name],
            ),
        )
        for (name, _), timing in timings.items()
    ]
