"""The cases by name, what ``fastsiam bench`` runs of them, and what it makes of the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fastsiam.bench import loading, training
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.convert import convert
from fastsiam.bench.knn import knn
from fastsiam.bench.machine import machine
from fastsiam.bench.records import (
    Record,
    caption,
    check_writable,
    differences,
    number,
    table,
    write,
)
from fastsiam.bench.session import Session, session
from fastsiam.bench.side_by_side import peers
from fastsiam.bench.sweep import sweep
from fastsiam.errors import BackendError

Case = Callable[[Session], list[Record]]

CASES: dict[str, Case] = {
    "machine": machine,
    "decode": loading.decode,
    "loader": loading.loader,
    "photometric": loading.photometric,
    "step": training.step,
    "train": training.train,
    "convert": convert,
    "startup": loading.startup,
    "sweep": sweep,
    "peers": peers,
    "knn": knn,
}
"""Each is a command; ``loader`` measures decoding too."""

METHOD = (
    "Each contender is a process of its own, warmed up (startup: new each time). They take turns "
    "(A B C A B C ...); a figure is the median of its repeats, its spread half the distance "
    "between the fastest and the slowest over that; beyond 15% it is marked as unsteady. "
    "One image is both of its views. CPU "
    "time is that of all of a contender's processes. Files are in the system's cache."
)


def run(case: str, config: BenchConfig) -> list[Record]:
    """Run one case, or all; print tables; write the records if that is asked for.

    Raises:
        BackendError: nothing of it could be measured here.
    """
    if config.json:
        check_writable(Path(config.json))
    with session(config) as own:
        records = _all(own) if case == "all" else CASES[case](own)
    if not records:
        raise BackendError("nothing could be measured; the reasons are above")
    print(f"{table(records)}\n\n{caption(records)}\n{METHOD}")
    for line in differences(records):
        print(line)
    if case == "all":
        print(f"\n{finding(records)}")
    if config.json:
        write(Path(config.json), records)
    return records


def _all(own: Session) -> list[Record]:
    """Run what tells a user most in few minutes."""
    variants = own.config.variants or ("" if own.gpu else _QUICK)
    return [
        *loading.loader(own),
        *loading.photometric(own),
        *training.train(own),
        *training.step(replace(own, config=replace(own.config, variants=variants))),
    ]


_QUICK = "eager,authors"
"""Steps of a CPU that need no compiler and one process."""


def finding(records: Sequence[Record]) -> str:
    """Say in a sentence what bounds training here, and what would make it faster.

    Args:
        records: of the cases ``loader`` and ``train``.
    """
    trained = {one.name: one for one in records if one.case == "train"}
    loaders = {one.name: one for one in records if one.case in ("loader", "decode")}
    loader = loaders.get("torchvision views")
    ceiling, baseline = trained.pop("synthetic", None), trained.get("torchvision")
    if not (ceiling and baseline and loader):
        return "No finding: torchvision's pipeline or training on ready tensors was not measured."
    said = (
        f"torchvision's loader delivers {number(loader.images_per_second)} images/s, "
        f"the model can take {number(ceiling.images_per_second)}: "
    )
    share = min(1.0, baseline.share_of_ceiling or 0.0)  # above 1 is noise
    reached = f"training reaches {share:.0%} of what it could"
    if share >= _KEEPS_UP:
        return f"{said}the model is the bound, and {reached}."
    if loader.images_per_second > 2 * ceiling.images_per_second:
        said += f"the model is the bound, but loading takes processor time from it, and {reached}"
    else:
        said += f"data-bound, {reached}"
    if "PIL" in loaders:
        decoding = loaders["PIL"].cpu_seconds_per_image / loader.cpu_seconds_per_image
        said += f"; decoding is {decoding:.0%} of the loader's work"
    if baseline.config.get("recipe") == "imagenet":
        trained.pop("memory", None)  # all of ImageNet fits nowhere
    best = max(trained.values(), key=lambda one: one.images_per_second)
    if best is baseline:
        return f"{said}; no other pipeline that can run here is faster."
    return (
        f"{said}; --pipeline {best.pipeline} reaches {min(1.0, best.share_of_ceiling or 0.0):.0%}."
    )


_KEEPS_UP = 0.95
