"""How fast crops are cut out of decoded images, beside torchvision and a mere copy of them."""

from __future__ import annotations

from fastsiam.bench.cases.photometric import measure_stage
from fastsiam.bench.contestants.geometric import ONCE, REFERENCE, build_geometric
from fastsiam.bench.records import Record
from fastsiam.bench.session import Session

_ON_GPU = 25600
"""Images of a repeat on a GPU."""


def measure(session: Session) -> list[Record]:
    """Measure the three on the same images, in one process."""
    return measure_stage(
        session,
        "geometric",
        build_geometric,
        baseline=("torchvision", REFERENCE),
        once=ONCE,
        on_gpu=_ON_GPU,
        in_the_clock="decoded images of 375 x 500 on the device to uint8 crops: crop, resize, flip",
    )
