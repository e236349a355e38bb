"""Records: what was measured, with all that the figures depend on."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from fastsiam.bench.measure import UNSTEADY, Timing
from fastsiam.environment import environment
from fastsiam.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure and where it comes from."""

    case: str
    """What sort of thing was measured: loader, decode, photometric, step, train, convert, ..."""
    name: str
    """What it is called in a table: unlike all others of its case."""
    pipeline: str = ""
    """The pipeline, where it is one's."""
    images_per_second: float
    """Median over the repeats. One image is both of its views."""
    spread: float
    """Half the distance between the fastest and the slowest repeat, over the median."""
    n: int
    """Repeats."""
    images: int
    """Images that went through in each repeat."""
    all_seconds: list[float]
    """Every repeat."""
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
    """Memory of its processes, without what the system caches of files."""
    gpu_bytes: int = 0
    """GPU memory that it came to hold, CUDA contexts included."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of it."""
    in_the_clock: str = ""
    """What the time includes, and what it does not."""
    config: dict[str, Any]
    """Settings."""
    environment: dict[str, Any]
    """Machine, versions, commit."""
    command: str
    """The command that measured it."""
    date: str
    """Day of the measurement."""

    @property
    def unsteady(self) -> bool:
        """Whether the repeats differ so much that the figure says little."""
        return self.spread > UNSTEADY


def record(
    case: str,
    name: str,
    timing: Timing,
    *,
    config: Mapping[str, Any],
    torchvision: Timing | None = None,
    baseline: tuple[str, Timing] | None = None,
    ceiling: tuple[str, Timing] | None = None,
    **more: Any,
) -> Record:
    """Make a record of a timing.

    Args:
        case: of the record.
        name: of the record.
        timing: the repeats.
        config: settings that the figure depends on.
        torchvision: of the pipeline that users have today.
        baseline: what to compare with else, and its name.
        ceiling: what limits it, and its name.
        more: other fields of ``Record``.
    """
    compared = baseline or (torchvision and ("torchvision", torchvision))
    return Record(
        case=case,
        name=name,
        images_per_second=timing.rate,
        spread=timing.spread,
        n=len(timing.samples),
        images=timing.images,
        all_seconds=timing.wall,
        ratio_to_torchvision=timing.rate / torchvision.rate if torchvision else None,
        baseline=compared[0] if compared else "",
        ratio=timing.rate / compared[1].rate if compared else None,
        ceiling=ceiling[0] if ceiling else "",
        share_of_ceiling=timing.rate / ceiling[1].rate if ceiling else None,
        cpu_seconds_per_image=timing.cpu / max(1, timing.images),
        cores_busy=timing.cpu / timing.median,
        host_bytes=timing.host,
        config=dict(config),
        environment=_environment(),
        command=_command(),
        date=datetime.date.today().isoformat(),
        **more,
    )


def write(path: Path, records: Sequence[Record]) -> None:
    """Write records as JSON: a list, one record a line.

    Raises:
        DataError: they cannot be written there.
    """
    lines = ",\n".join(json.dumps(asdict(one)) for one in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"[\n{lines}\n]\n")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Refuse a file that ``write`` cannot write, before minutes are spent on what goes into it.

    Raises:
        DataError: says why.
    """
    there = next(parent for parent in path.absolute().parents if parent.exists())
    target = path if path.exists() else there
    if path.is_dir() or not there.is_dir() or not os.access(target, os.W_OK):
        raise DataError(f"cannot write {path}: it is a folder, or not yours to write")


def read(path: Path) -> list[Record]:
    """Read a file of records.

    Raises:
        DataError: it is missing, or holds something else.
    """
    known = {f.name for f in fields(Record)}
    try:
        found = json.loads(path.read_text())
        return [Record(**{k: v for k, v in one.items() if k in known}) for one in found]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} holds no records of fastsiam bench") from error


def table(records: Sequence[Record]) -> str:
    """Return records as a Markdown table that people can read as it is.

    A column in which no record has anything is left out. Where not all compare with the same, or
    have the same ceiling, its name stands in the cells.
    """
    baseline, ceiling = (_only({getattr(r, of) for r in records}) for of in ("baseline", "ceiling"))
    several = len({r.case for r in records}) > 1

    def column(head: str, show: Callable[[Record], str]) -> tuple[str, list[str]]:
        return head, [show(one).replace("|", "\\|") for one in records]

    columns = [
        column("case" if several else "", lambda r: r.case if several else ""),
        column("", lambda r: r.name),
        column("images/s", lambda r: number(r.images_per_second) if r.images else ""),
        column("spread", _spread),
        column(
            f"times {baseline}" if baseline else "compared",
            lambda r: (
                ""
                if r.ratio is None
                else f"{number(r.ratio)}" + ("" if baseline else f" x {r.baseline}")
            ),
        ),
        column(
            f"share of {ceiling}" if ceiling else "of the ceiling",
            lambda r: (
                ""
                if r.share_of_ceiling is None
                else f"{r.share_of_ceiling:.0%}" + ("" if ceiling else f" of {r.ceiling}")
            ),
        ),
        column("rate", lambda r: str(r.facts.get("rate", ""))),
        column("s to first batch", lambda r: _fact(r, "first_batch", ".1f")),
        column("s for first epoch", lambda r: _fact(r, "first_epoch", ".2f")),
        column("s for later epochs", lambda r: _fact(r, "later_epoch", ".2f")),
        column("waiting for data", lambda r: _fact(r, "data_wait", ".0%")),
        column("top-1 (%)", lambda r: _fact(r, "top1", ".2f")),
        column("MB/s", lambda r: _fact(r, "megabytes_per_second", ",.0f")),
        column(
            "CPU ms an image",
            lambda r: number(1000 * r.cpu_seconds_per_image) if r.images else "",
        ),
        column("cores busy", lambda r: f"{r.cores_busy:.1f}"),
        column("host MB", lambda r: f"{r.host_bytes / 1e6:,.0f}" if r.host_bytes else ""),
        column("GPU MB", lambda r: f"{r.gpu_bytes / 1e6:,.0f}" if r.gpu_bytes else ""),
    ]
    columns = [(head, cells) for head, cells in columns if any(cells)]
    widths = [max(len(head), 3, *map(len, cells)) for head, cells in columns]
    rows = [
        [head for head, _ in columns],
        ["-" * width for width in widths],
        *([cells[i] for _, cells in columns] for i in range(len(records))),
    ]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(f"| {line} |" for line in lines)


def caption(records: Sequence[Record]) -> str:
    """Say in one line what a table was measured on."""
    first = records[0]
    machine, packages = first.environment, first.environment["packages"]
    names = {"torch", "torchvision", "pillow", "ffcv", "nvidia-dali-cuda120", "nvidia-dali-cuda130"}
    versions = ", ".join(f"{name} {packages[name]}" for name in packages if name in names)
    images = {one.images for one in records if one.images}
    many = f"{images.pop():,} images a repeat, " if len(images) == 1 else ""
    repeats = sorted({one.n for one in records})
    return (
        f"{many}medians of {' or '.join(map(str, repeats))} in turns; {machine['cores']} cores of "
        f"{machine['cpu']}, {', '.join(machine['gpus']) or 'no GPU'}; {versions}; {first.date}"
    )


def differences(records: Sequence[Record]) -> list[str]:
    """Say of each that does other work than ours what it does, as items of a Markdown list."""
    return [
        f"- {one.name} {one.facts['version']}: {one.facts['differs']}"
        for one in records
        if "differs" in one.facts
    ]


def _only(names: set[str]) -> str:
    """Return the name that all share which have one, or an empty text."""
    found = names - {""}
    return found.pop() if len(found) == 1 else ""


def _spread(one: Record) -> str:
    if one.n == 1:
        return "once"
    return f"±{one.spread:.0%}" + (" (unsteady)" if one.unsteady else "")


def _fact(one: Record, name: str, form: str) -> str:
    return format(one.facts[name], form) if name in one.facts else ""


def number(value: float) -> str:
    """Write a figure for people, with as many digits as mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


_environment = cache(environment)


def _command() -> str:
    """Return the command line as a user types it."""
    return shlex.join(["fastsiam", *sys.argv[1:]])
