"""How fast each pipeline loads, to uint8 crops and to finished views, beside bare decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastsiam.bench.cases.decode import decode_records, enter_decoders, fastest
from fastsiam.bench.config import CONTAINERS, Stored
from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.loader import build_loading, build_plain_crops
from fastsiam.bench.images import Images
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing
from fastsiam.config import Pipeline
from fastsiam.pipelines.backends import BACKENDS, BASELINE

Entered = dict[str, tuple[Pipeline, Stored]]
"""Contenders by name: a pipeline, on images in some form."""


def measure(session: Session) -> list[Record]:
    """Measure each pipeline on each form of the images, and the decoders."""
    images = session.images(session.loaded_batch)
    with session.contest() as contest:
        enter_decoders(contest, session, images)
        entered = _enter(contest, session, images)
        timings = contest.run(session.config.repeats)
        contenders = dict(contest.contenders)
        facts = {turn: contest.facts(*turn) for turn in timings}
    baseline = timings.get((BASELINE, "views"))
    records = decode_records(session, images, timings)
    for name, (pipeline, form) in entered.items():
        for work in contenders[name].images:
            if (name, work) not in timings:
                continue
            one = record(
                "loader",
                f"{pipeline} {work}" + ("" if form == "original" else f", {form}"),
                timings[name, work],
                torchvision=baseline,
                ceiling=_ceiling(session, pipeline, form, timings),
                pipeline=pipeline,
                gpu_bytes=contenders[name].gpu,
                facts={"what": work, "stored": form, **facts[name, work]},
                in_the_clock="one epoch, from its first request to its last batch on the device; "
                "not: opening the data, compiling, the first epoch",
                config=session.settings(
                    batch=session.loaded_batch, workers=session.workers, data=images.about
                ),
            )
            records.append(one)
    return records


def _enter(contest: Contest, session: Session, images: Images) -> Entered:
    """Have each pipeline take part; the baseline reads the original images, as its users do."""
    entered: Entered = {}
    for pipeline in session.config.pipeline_names:
        for form in session.forms(pipeline):
            settings: dict[str, Any] = {
                "data": session.data(images, pipeline, form),
                "augment": session.config.augment,
                "batch": session.loaded_batch,
                "images": images.count,
                "device": session.device,
            }
            name = pipeline if form == "original" else f"{pipeline}, {form}"
            builds = {name: build_loading}
            if not BACKENDS[pipeline].crops:
                builds[f"{name}, without colours"] = build_plain_crops
            for entry, build in builds.items():
                if contest.enter(entry, build, **settings):
                    entered[entry] = pipeline, form
    return entered


def _ceiling(
    session: Session, pipeline: Pipeline, form: Stored, timings: Mapping[tuple[str, str], Timing]
) -> tuple[str, Timing] | None:
    """Return the fastest decoder, of the device on which a pipeline decodes, if it does."""
    backend = BACKENDS[pipeline]
    if backend.decoder is None:
        return None
    bytes_of: Stored = "original" if form in CONTAINERS else form
    found = fastest(timings, bytes_of, on_gpu=session.gpu and backend.decodes_on_gpu)
    return ("bare decoding", found) if found else None
