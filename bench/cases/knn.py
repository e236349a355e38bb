"""How fast the kNN classifier is, beside lightly's, on the same features.

The features are made: points around a centre for each class, in the numbers and dimensions of
CIFAR-10 with a ResNet-18, and of a part of ImageNet with a ResNet-50.
"""

from __future__ import annotations

from fastsiam.bench.contestants.knn import TEMPERATURE, K, build_knn
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session

_SIZES = {
    "CIFAR-10": {"bank": 50_000, "queries": 10_000, "dim": 512, "classes": 10},
    "ImageNet, a part": {"bank": 100_000, "queries": 2_000, "dim": 2048, "classes": 1000},
}


def measure(session: Session) -> list[Record]:
    """Measure ours and lightly's on each set of features."""
    records = []
    for title, size in _SIZES.items():
        with session.contest() as contest:
            for name in ("fastsiam", "lightly"):
                contest.enter(name, build_knn, name=name, device=session.device, **size)
            timings = contest.run(session.config.repeats)
            facts = {turn: contest.facts(*turn) for turn in timings}
            contenders = contest.contenders
        lightly = timings.get(("lightly", "knn"))
        records += [
            record(
                "knn",
                f"{name}, {title}",
                timing,
                baseline=("lightly", lightly) if lightly else None,
                gpu_bytes=contenders[name].gpu,
                facts=facts[name, work],
                in_the_clock="normalising, search and vote; features are on the device",
                config={"k": K, "temperature": TEMPERATURE, "device": session.device, **size},
            )
            for (name, work), timing in timings.items()
        ]
    return records
