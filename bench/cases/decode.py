"""How fast decoders are on the bytes alone: the ceiling of a loader."""

from __future__ import annotations

from collections.abc import Mapping

from fastsiam.bench.config import CONTAINERS
from fastsiam.bench.contest import Contest
from fastsiam.bench.contestants.decode import (
    ON_GPU,
    OPTIONAL,
    OUR_PART,
    OURS,
    TURBO_PART,
    build_decoding,
)
from fastsiam.bench.images import FORMS, Images
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing

_DECODE = "decode"


def measure(session: Session) -> list[Record]:
    """Measure decoders on each form of the images that is encoded."""
    images = session.images(session.loaded_batch)
    with session.contest() as contest:
        enter_decoders(contest, session, images)
        timings = contest.run(session.config.repeats)
    return decode_records(session, images, timings)


def enter_decoders(contest: Contest, session: Session, images: Images) -> None:
    """Have decoders take part, a contender for each form of the images that is encoded."""
    for form in session.config.forms:
        if form in CONTAINERS or FORMS[form].raw:
            continue  # the bytes are the original images', or nothing is to be decoded
        contest.enter(
            f"{_DECODE}, {form}",
            build_decoding,
            path=str(images.folder if form == "original" else images.stored(form)),
            workers=session.workers,
            batch=session.loaded_batch,
            device=session.device,
        )


def decode_records(
    session: Session, images: Images, timings: Mapping[tuple[str, str], Timing]
) -> list[Record]:
    """Return the records of the decoders that took part, and say which did not."""
    for name, install in OPTIONAL.items():
        if not any(work == name for _, work in timings) and not (session.gpu and name == "DALI"):
            session.console.say(f"{name}: left out: it refuses an image, or is missing: {install}")
    return [
        record(
            "decode",
            work if form == "original" else f"{work}, {form}",
            timing,
            facts={"stored": form},
            in_the_clock="encoded bytes in memory to pixels, in as many threads as workers",
            config=session.settings(batch=0, workers=session.workers, data=images.about),
        )
        for (name, work), timing in timings.items()
        if name.startswith(_DECODE)
        for form in [name.partition(", ")[2]]
    ]


def fastest(timings: Mapping[tuple[str, str], Timing], form: str, *, on_gpu: bool) -> Timing | None:
    """Return the timing of bare decoding: of the fastest of others' decoders of whole images.

    What decodes a part only is left out, and so is our own decoder: what they save is part of what
    the pipelines have gained.
    """
    found = [
        timing
        for (name, work), timing in timings.items()
        if name == f"{_DECODE}, {form}" and work not in (OURS, OUR_PART, TURBO_PART)
        if (work in ON_GPU) == on_gpu
    ]
    return max(found, key=lambda timing: timing.rate, default=None)
