"""The record of a soak, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastsiam.bench.soak.vitals import Growth
from fastsiam.config.plain import from_plain
from fastsiam.errors import DataError
from fastsiam.files import parsed_json, write_json
from fastsiam.report.markdown import markdown

_UNITS = {"memory": "MB", "descriptors": "", "threads": "", "shared": "MB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRun:
    """One run that was hurt, held to the undisturbed one of the same settings."""

    pipeline: str
    seed: int
    steps: int
    starts: int
    """How often its command was given."""
    faults: tuple[str, ...]
    """What was done to it, in turn."""
    difference: str
    """In what its lines or its last weights differ from the undisturbed run's; empty if nowhere."""
    left: tuple[str, ...]
    """What it left behind: processes, files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRecord:
    """All of a soak."""

    minutes: float
    """How long it took."""
    seed: int
    ranks: int
    runs: tuple[SoakRun, ...]
    findings: tuple[str, ...]
    """What went wrong; none is what is hoped for."""
    growth: dict[str, Growth]
    """Of what runs hold, over the stretches without a fault."""
    command: str
    environment: dict[str, Any]
    date: str


def write_record(path: Path, record: SoakRecord) -> None:
    """Write a record as JSON.

    Raises:
        FastSiamError: the file cannot be written.
    """
    write_json(path, asdict(record))


def read_record(path: Path) -> SoakRecord:
    """Read what ``write_record`` wrote.

    Raises:
        DataError: it is missing, or holds something else.
    """
    try:
        plain = parsed_json(path.read_text())
        growth = {name: from_plain(Growth, one) for name, one in plain.pop("growth").items()}
        runs = tuple(
            SoakRun(**(one | {k: tuple(one[k]) for k in ("faults", "left")}))
            for one in plain.pop("runs")
        )
        findings = tuple(plain.pop("findings"))
        return SoakRecord(**plain, runs=runs, growth=growth, findings=findings)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} holds no record of fastsiam bench soak") from error


def as_markdown(record: SoakRecord) -> str:
    """Return a caption, the tables of runs, faults and growth, and what went wrong."""
    machine, packages = record.environment, record.environment["packages"]
    caption = (
        f"{len(record.runs)} runs of {record.ranks} gloo ranks in {record.minutes:.0f} minutes, "
        f"seed {record.seed}; {machine['cores']} cores of {machine['cpu']}; "
        f"torch {packages['torch']}; {record.date}; `{record.command}`"
    )
    found = [f"- {one}" for one in record.findings] or ["Nothing else was found."]
    parts = [caption, _runs(record.runs), _faults(record.runs), _growth(record), "\n".join(found)]
    return "\n\n".join(parts)


def _runs(runs: Sequence[SoakRun]) -> str:
    heads = ("pipeline", "runs", "steps", "starts", "faults", "unlike the undisturbed run")
    rows = []
    for pipeline in dict.fromkeys(one.pipeline for one in runs):
        of = [one for one in runs if one.pipeline == pipeline]
        steps, starts = (sum(getattr(one, x) for one in of) for x in ("steps", "starts"))
        faults = sum(len(one.faults) for one in of)
        differ = sum(bool(one.difference) for one in of)
        rows.append([pipeline, *(f"{x:,}" for x in (len(of), steps, starts, faults, differ))])
    return markdown(heads, rows)


def _faults(runs: Sequence[SoakRun]) -> str:
    counted = Counter(fault for one in runs for fault in one.faults)
    return markdown(("fault", "times"), [[name, f"{n}"] for name, n in counted.most_common()])


def _growth(record: SoakRecord) -> str:
    heads = ("held by a run", "median", "growth in an hour", "95% interval", "stretches", "looks")
    rows = [
        [
            f"{name} {_UNITS[name]}".rstrip(),
            f"{one.level:,.1f}",
            f"{one.slope:+,.2f}",
            f"{one.low:+,.2f} to {one.high:+,.2f}",
            f"{one.stretches}",
            f"{one.samples:,}",
        ]
        for name, one in record.growth.items()
    ]
    return markdown(heads, rows)
