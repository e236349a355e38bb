"""How fast the photometric stage is, beside its reference and beside touching the bytes once."""

from __future__ import annotations

from fastsiam.bench.contest import Build
from fastsiam.bench.contestants.photometric import ONCE, REFERENCE, build_photometric
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session

_ON_GPU = 51200
"""Images of a repeat on a GPU, which takes a tenth of a second for them."""


def measure(session: Session) -> list[Record]:
    """Measure the three on the same crops, in one process."""
    return measure_stage(
        session,
        "photometric",
        build_photometric,
        baseline=("reference", REFERENCE),
        once=ONCE,
        on_gpu=_ON_GPU,
        in_the_clock="uint8 crops on the device to normalised float32 views (GPU: bfloat16)",
    )


def measure_stage(
    session: Session,
    case: str,
    build: Build,
    *,
    baseline: tuple[str, str],
    once: str,
    on_gpu: int,
    in_the_clock: str,
) -> list[Record]:
    """Measure a stage between decoding and the model, in one process.

    Args:
        session: of the measurement.
        case: name of the stage.
        build: makes its work; see ``contestants.photometric``.
        baseline: what it is compared with, and the name of that work.
        once: name of the work that only touches the bytes.
        on_gpu: images of a repeat on a GPU.
        in_the_clock: what the time includes.
    """
    batch = session.loaded_batch
    with session.contest() as contest:
        contest.enter(
            case,
            build,
            augment=session.config.augment,
            batch=batch,
            batches=max(1, on_gpu // batch) if session.gpu else 2,
            device=session.device,
        )
        timings = contest.run(session.config.repeats)
    compared, ceiling = timings.get((case, baseline[1])), timings.get((case, once))
    return [
        record(
            case,
            work,
            timing,
            baseline=(baseline[0], compared) if compared else None,
            ceiling=("one pass", ceiling) if ceiling else None,
            in_the_clock=in_the_clock,
            config=session.settings(batch=batch),
        )
        for (_, work), timing in timings.items()
    ]
