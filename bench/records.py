"""Timings of repeated work, and records: measurements with everything that they depend on."""

from __future__ import annotations

import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fastsiam.environment import environment
from fastsiam.errors import DataError
from fastsiam.files import explained, parsed_json, written_whole
from fastsiam.pipelines.backends import BASELINE

Thing = TypeVar("Thing")
UNSTEADY = 0.15
"""A spread wider than this is marked: such a figure says little."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a piece of work."""

    wall: float
    """Seconds by the clock."""
    cpu: float
    """Seconds of processor time, child processes included."""
    host: int = 0
    """Bytes of memory that its processes hold after it, without what the system caches of files."""


@dataclass
class Timing:
    """Repeats of one piece of work."""

    samples: list[Sample] = field(default_factory=list)
    images: int = 0
    """Images that go through in each repeat."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of it; "settings": how it was computed, if only its process knows."""
    gpu: int = 0
    """Bytes of GPU memory that its processes hold, CUDA contexts included."""

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
    """What sort of thing was measured: loader, decode, photometric, step, train, convert, ..."""
    name: str
    """What it is called in a table: unlike all others of its case."""
    pipeline: str = ""
    images_per_second: float
    """Median over the repeats. One image is both of its views."""
    spread: float
    """Half the distance between the fastest and the slowest repeat, over the median."""
    n: int
    """Repeats."""
    images: int
    """Images that went through in each repeat."""
    all_seconds: list[float]
    ratio_to_torchvision: float | None = None
    """How many times as fast as torchvision's pipeline in the same run."""
    baseline: str = ""
    """Name of the record that ``ratio`` compares with, of the same case and run."""
    ratio: float | None = None
    """How many times as fast as the baseline."""
    ceiling: str = ""
    """What limits it: bare decoding for a loader, training on ready tensors for training."""
    share_of_ceiling: float | None = None
    """Its speed over the ceiling's, in the same run."""
    cpu_seconds_per_image: float
    """Processor time of all its processes."""
    cores_busy: float
    """Processor time over wall-clock time."""
    host_bytes: int = 0
    """The largest of its samples' ``host``."""
    gpu_bytes: int = 0
    """GPU memory that it came to hold, CUDA contexts included."""
    facts: dict[str, Any] = field(default_factory=dict)
    in_the_clock: str = ""
    """What the time includes, and what it does not."""
    config: dict[str, Any]
    """Settings, as they were used."""
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
    """A record to be made: what is measured, and what it is compared with."""

    case: str
    name: str
    """Of the record, and of what is timed for it."""
    build: Callable[[], Any] = dict
    """Builds the tasks of the runner that measures it, if one does; see ``runner.Build``."""
    runner: str = ""
    """Name of the runner, if it measures several rows."""
    ranks: int = 1
    """Processes of the runner."""
    pipeline: str = ""
    torchvision: str = ""
    """Row of the pipeline that users have today."""
    baseline: tuple[str, str] = ("", "")
    """What to compare with else: what tables call it, and its row."""
    ceiling: tuple[str, Sequence[str]] = ("", ())
    """What limits it: what tables call it, and its row; of several the fastest."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it, beside what the timing has."""
    in_the_clock: str
    config: Mapping[str, Any]
    """Settings that the figure depends on, beside "settings" of the facts."""

    def record(self, timings: Mapping[str, Timing]) -> Record:
        """Return the record, from the timings of rows by name; those of others may be missing."""
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
    """Write records as JSON: a list, one record a line.

    Raises:
        DataError: they cannot be written there.
    """
    lines = ",\n".join(json.dumps(asdict(one)) for one in records)
    with explained(DataError, f"cannot write {path}"), written_whole(path) as temporary:
        temporary.write_text(f"[\n{lines}\n]\n")


def read(path: Path) -> list[Record]:
    """Read a file of records.

    Raises:
        DataError: it is missing, or holds something else.
    """
    known = {f.name for f in fields(Record)}
    try:
        with explained(DataError, f"cannot read {path}"):
            found = parsed_json(path.read_text())
        records = [Record(**{k: v for k, v in one.items() if k in known}) for one in found]
    except (ValueError, TypeError, AttributeError):
        records = []
    if not records:
        raise DataError(f"{path} holds no records of fastsiam bench")
    return records


def grouped(things: Iterable[Record], key: Callable[[Record], Thing]) -> dict[Thing, list[Record]]:
    """Return the records by what they have in common, in the order in which that first appears."""
    groups: dict[Thing, list[Record]] = {}
    for one in things:
        groups.setdefault(key(one), []).append(one)
    return groups


_environment = cache(environment)


def circumstances() -> dict[str, Any]:
    """Return the fields of a record that say by which command, where and when it was measured."""
    return {
        "command": shlex.join(["fastsiam", *sys.argv[1:]]),
        "environment": _environment(),
        "date": datetime.date.today().isoformat(),
    }
