"""How fast crops are cut out of decoded images, beside torchvision and a mere copy of them."""

from __future__ import annotations

from fastsiam.bench.contestants.geometric import ONCE, REFERENCE, build_geometric
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session

_ON_GPU = 25600
"""Images of a repeat on a GPU."""


def measure(session: Session) -> list[Record]:
    """Measure the three on the same images, in one process."""
    batch = session.loaded_batch
    with session.contest() as contest:
        contest.enter(
            "geometric",
            build_geometric,
            augment=session.config.augment,
            batch=batch,
            batches=max(1, _ON_GPU // batch) if session.gpu else 2,
            device=session.device,
        )
        timings = contest.run(session.config.repeats)
    ceiling = timings.get(("geometric", ONCE))
    baseline = timings.get(("geometric", REFERENCE))
    return [
        record(
            "geometric",
            work,
            timing,
            baseline=("torchvision", baseline) if baseline else None,
            ceiling=("one pass", ceiling) if ceiling else None,
            in_the_clock="decoded images of 375 x 500 on the device to uint8 crops: crop, resize, "
            "flip",
            config=session.settings(batch=batch),
        )
        for (_, work), timing in timings.items()
    ]
