"""How fast the photometric stage is, beside its reference and beside touching the bytes once."""

from __future__ import annotations

from fastsiam.bench.contestants.photometric import ONCE, REFERENCE, build_photometric
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session

_ON_GPU = 51200
"""Images of a repeat on a GPU, which takes a tenth of a second for them."""


def measure(session: Session) -> list[Record]:
    """Measure the three on the same crops, in one process."""
    batch = session.loaded_batch
    with session.contest() as contest:
        contest.enter(
            "photometric",
            build_photometric,
            augment=session.config.augment,
            batch=batch,
            batches=max(1, _ON_GPU // batch) if session.gpu else 2,
            device=session.device,
        )
        timings = contest.run(session.config.repeats)
    ceiling = timings.get(("photometric", ONCE))
    baseline = timings.get(("photometric", REFERENCE))
    return [
        record(
            "photometric",
            work,
            timing,
            baseline=("reference", baseline) if baseline else None,
            ceiling=("one pass", ceiling) if ceiling else None,
            in_the_clock="uint8 crops on the device to normalised float32 views (GPU: bfloat16)",
            config=session.settings(batch=batch),
        )
        for (_, work), timing in timings.items()
    ]
