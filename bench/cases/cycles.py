"""What each stage of the CPU's kernels costs a pixel, in one thread, with each kind of library."""

from __future__ import annotations

from fastsiam.bench.contestants.cycles import build_cycles
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.kernels import library

_IMAGES = 64
"""Whose decoded pixels, and crops, are more than a cache holds, as in training."""


def measure(session: Session) -> list[Record]:
    """Measure each stage with each kind of library that this processor can run, in turns."""
    images = session.images(session.loaded_batch)
    count = min(_IMAGES, images.count)
    with session.contest() as contest:
        for kind in library.kinds():
            contest.enter(
                kind,
                build_cycles,
                path=str(images.folder),
                augment=session.config.augment,
                images=count,
                kind=kind,
            )
        timings = contest.run(session.config.repeats)
        facts = {turn: contest.facts(*turn) for turn in timings}
    return [
        record(
            "cycles",
            f"{stage}, {kind}",
            timing,
            facts=facts[kind, stage] | {"kind": kind, "stage": stage},
            in_the_clock="ns and cycles: CPU time of one thread, medians; of a decoded pixel, else "
            "of a crop's; what is done to colours, with the normalisation to float32; cycles are "
            "those of the time-stamp counter, whose rate is told, and not the cores' own",
            config=session.settings(batch=0, images=count, data=images.about),
        )
        for (kind, stage), timing in timings.items()
    ]
