"""Timings of repeated work, and records: measurements together with their conditions."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from fastsiam.environment import environment
from fastsiam.errors import DataError
from fastsiam.files import atomic_write_for_user, os_errors_as, parse_json
from fastsiam.pipelines.backends import BASELINE

UNSTEADY = 0.15
"""Spread above which a figure is marked as unsteady."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a piece of work."""

    wall: float
    """Wall-clock seconds."""
    cpu: float
    """Processor seconds, including child processes."""
    host: int = 0
    """Bytes of memory that its processes use afterwards, without the page cache."""


@dataclass
class Timing:
    """All repeats of a piece of work."""

    samples: list[Sample] = field(default_factory=list)
    images: int = 0
    """Images processed in each repeat."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Other facts; "settings" are those that only the measured process knows."""
    gpu: int = 0
    """Bytes of GPU memory that its processes use, including CUDA contexts."""

    @property
    def median(self) -> float:
        """Median of the wall-clock seconds."""
        return statistics.median(sample.wall for sample in self.samples)

    @property
    def rate(self) -> float:
        """Images per second in the median repeat."""
        return self.images / self.median


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement and its conditions."""

    case: str
    """What was measured: loader, decode, photometric, step, train, convert, ..."""
    name: str
    """Name in tables, unique within the case."""
    pipeline: str = ""
    images_per_second: float
    """Median over the repeats. An image counts once, however many views are made of it."""
    spread: float
    """Half the difference between the slowest and the fastest repeat, divided by the median."""
    n: int
    """Number of repeats."""
    images: int
    """Images processed in each repeat."""
    all_seconds: list[float]
    ratio_to_torchvision: float | None = None
    """Speed relative to torchvision's pipeline in the same run."""
    baseline: str = ""
    """What tables call the record that ``ratio`` compares with, of the same case and run."""
    ratio: float | None = None
    """Speed relative to the baseline."""
    ceiling: str = ""
    """What tables call its upper limit, such as bare decoding for a loader."""
    share_of_ceiling: float | None = None
    """Speed relative to the ceiling's in the same run."""
    cpu_seconds_per_image: float
    """Processor seconds of all its processes."""
    cores_busy: float
    """Processor time divided by wall-clock time."""
    host_bytes: int = 0
    """The largest ``host`` of its samples."""
    gpu_bytes: int = 0
    """GPU memory that its processes use, including CUDA contexts."""
    facts: dict[str, Any] = field(default_factory=dict)
    in_the_clock: str = ""
    """What the time includes and excludes."""
    config: dict[str, Any]
    """Settings that were used."""
    environment: dict[str, Any]
    """Machine, versions, commit."""
    command: str
    date: str

    @property
    def unsteady(self) -> bool:
        """Whether the repeats differ too much for a reliable result."""
        return self.spread > UNSTEADY


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: what to measure, and what to compare it with."""

    case: str
    name: str
    """Name of the record, and of the task that is timed for it."""
    build: Callable[[], Any] = dict
    """Builds the tasks of the runner that measures the row, if any; see ``runner.Build``."""
    runner: str = ""
    """Name of the runner, if it measures several rows."""
    ranks: int = 1
    """Number of processes of the runner."""
    pipeline: str = ""
    torchvision: str = ""
    """Row of torchvision's pipeline, the one that users have today."""
    baseline: tuple[str, str] = ("", "")
    """Another baseline: its name in tables, and its row. Default: torchvision's pipeline."""
    ceiling: tuple[str, Sequence[str]] = ("", ())
    """Upper limit: its name in tables, and its rows, of which the fastest counts."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts in addition to those of the timing."""
    in_the_clock: str
    config: Mapping[str, Any]
    """Settings that the figure depends on, in addition to "settings" of the facts."""

    def record(self, timings: Mapping[str, Timing]) -> Record:
        """Build the record from timings by row name; those of other rows may be missing."""
        timing, torchvision = timings[self.name], timings.get(self.torchvision)
        baseline, base = self.baseline[0], timings.get(self.baseline[1])
        if base is None:
            baseline, base = BASELINE, torchvision
        walls = [sample.wall for sample in timing.samples]
        cpu = statistics.median(sample.cpu for sample in timing.samples)
        facts = {**timing.facts, **self.facts}
        limits = [timings[name].rate for name in self.ceiling[1] if name in timings]
        return Record(
            case=self.case,
            name=self.name,
            pipeline=self.pipeline,
            images_per_second=timing.rate,
            spread=(max(walls) - min(walls)) / 2 / timing.median,
            n=len(walls),
            images=timing.images,
            all_seconds=walls,
            ratio_to_torchvision=timing.rate / torchvision.rate if torchvision else None,
            baseline=baseline if base else "",
            ratio=timing.rate / base.rate if base else None,
            ceiling=self.ceiling[0] if limits else "",
            share_of_ceiling=timing.rate / max(limits) if limits else None,
            cpu_seconds_per_image=cpu / max(1, timing.images),
            cores_busy=cpu / timing.median,
            host_bytes=max(sample.host for sample in timing.samples),
            gpu_bytes=timing.gpu,
            config={**self.config, **facts.pop("settings", {})},
            facts=facts,
            in_the_clock=self.in_the_clock,
            **circumstances(),
        )


def write(path: Path, records: Sequence[Record]) -> None:
    """Write records as a JSON list with one record per line.

    Raises:
        FastSiamError: the file cannot be written.
    """
    lines = ",\n".join(json.dumps(asdict(one)) for one in records)
    with atomic_write_for_user(path) as temporary:
        temporary.write_text(f"[\n{lines}\n]\n")


def read(path: Path) -> list[Record]:
    """Read a file of records.

    Raises:
        DataError: the file is missing or has no valid records.
    """
    field_names = {f.name for f in fields(Record)}
    try:
        with os_errors_as(DataError, f"cannot read {path}"):
            content = parse_json(path.read_text())
        records = [Record(**{k: v for k, v in one.items() if k in field_names}) for one in content]
    except (ValueError, TypeError, AttributeError):
        records = []
    if not records:
        raise DataError(f"{path} holds no records of fastsiam bench")
    return records


_environment = cache(environment)


def circumstances() -> dict[str, Any]:
    """Return the command, environment and date of this measurement, as fields of a record."""
    return {
        "command": shlex.join(["fastsiam", *sys.argv[1:]]),
        "environment": _environment(),
        "date": datetime.date.today().isoformat(),
    }
