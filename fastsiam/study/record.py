"""The record of a study: its rows with what came of every seed, which tables and pictures show.

``fastsiam study table NAME --json FILE`` writes one. Verdicts are not in it: they follow from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastsiam.config import TrainConfig
from fastsiam.config.flags import FIXED_SECTIONS, flags_by_section
from fastsiam.config.plain import from_plain
from fastsiam.config.run_settings import RunSettings
from fastsiam.config.study import StudyConfig
from fastsiam.errors import DataError
from fastsiam.files import explained, parsed_json, written_for_user
from fastsiam.run.records import read_records
from fastsiam.study.results import Result, read_result
from fastsiam.study.runs import Run
from fastsiam.study.scales import Measure, Scale
from fastsiam.study.tables import Claim, Study
from fastsiam.study.variants import Variant, unchanged
from fastsiam.study.verdicts import Verdict, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """A row of a study's table."""

    variant: str
    """Name of its variant."""
    title: str
    setting: str
    """What it changes of the scale's recipe, in that scale's numbers."""
    paper: float | str | None
    """The paper's accuracy in percent, or its word for it; None where it gives no figure."""
    claims: tuple[Claim, ...]
    """What the paper says of it."""
    results: tuple[Result, ...]
    """What came of each seed that is done."""
    original: float | str | None = None
    """The figure of the method's own paper in percent, where the table has it beside."""

    @property
    def linear(self) -> list[float]:
        """Linear top-1 of each seed (chance, if it diverged); none if a seed lacks it."""
        found = [one.top1 if one.diverged else one.linear for one in self.results]
        return [] if None in found else [x for x in found if x is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A study at a scale, and what came of it."""

    study: str
    """Name of the study."""
    title: str
    source: str
    """Where the paper has it."""
    figure: str
    """What the paper's figures are: never the measure of ours but at the paper's scale."""
    reference: str
    """Name of the variant whose row the others' gains are judged by."""
    scale: str
    """Name of the scale."""
    network: str
    """Network and images of the scale."""
    measure: Measure
    """What ours are, in percent."""
    chance: float
    """Top-1 of a guess, in percent."""
    epochs: int
    """Of the base recipe."""
    rows: tuple[RowRecord, ...]
    command: str
    """What makes the runs."""
    date: str
    """Day on which the record was made."""
    environments: tuple[dict[str, Any], ...]
    """``fastsiam.environment`` of the runs, each once."""
    cached: bool = False
    """Whether linear evaluation beside kNN was of cached features."""
    pixels: float | None = None
    """kNN top-1 of the raw pixels, in percent; None where no run of the study has it."""

    @property
    def results(self) -> dict[str, tuple[Result, ...]]:
        """What came of each row, by its variant's name."""
        return {row.variant: row.results for row in self.rows}

    @property
    def has_linear(self) -> bool:
        """Whether any seed has a linear evaluation beside kNN."""
        return any(one.linear is not None for row in self.rows for one in row.results)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of which anything is done."""
        return tuple(sorted({one.seed for row in self.rows for one in row.results}))

    def row(self, variant: str) -> RowRecord:
        """Return the row of a variant, by its name."""
        return next(row for row in self.rows if row.variant == variant)

    def verdicts(self, row: RowRecord) -> list[tuple[Claim, Verdict]]:
        """Judge each of the paper's claims on a row."""
        return [
            (claim, judge(claim, row.variant, self.results, reference=self.reference))
            for claim in row.claims
        ]


def study_record(
    study: Study, scale: Scale, runs: Sequence[Run], config: StudyConfig
) -> StudyRecord:
    """Return the record of a study's runs that are done.

    Args:
        study: whose rows there are.
        scale: of the runs.
        runs: all that may be there; those of other studies are left out.
        config: how the runs were asked for.

    Raises:
        FastSiamError: a file cannot be read.
    """
    results: dict[str, list[Result]] = {row.variant.name: [] for row in study.rows}
    environments: list[dict[str, Any]] = []
    for run in runs:
        if run.variant.name in results and (result := read_result(run)) is not None:
            results[run.variant.name].append(result)
            if (own := RunSettings.read(run.folder).environment) not in environments:
                environments.append(own)
    seeds = 1 + max((one.seed for row in results.values() for one in row), default=-1)
    asked = f" --epochs {config.epochs}" if config.epochs else ""
    asked += f" --seeds {seeds}" if seeds not in (0, scale.seeds) else ""
    has_linear = any(one.linear is not None for row in results.values() for one in row)
    asked += " --linear" if has_linear else ""
    return StudyRecord(
        study=study.name,
        title=study.title,
        source=study.source,
        figure=study.figure,
        reference=study.reference,
        scale=scale.name,
        network=scale.title,
        measure=scale.measure,
        chance=scale.chance,
        epochs=scale.base.optim.epochs,
        rows=tuple(
            RowRecord(
                variant=row.variant.name,
                title=row.variant.title,
                setting=setting(scale, row.variant),
                paper=row.paper,
                claims=row.claims,
                results=tuple(results[row.variant.name]),
                original=row.original,
            )
            for row in study.rows
        ),
        command=f"fastsiam study run {study.name} --scale {config.scale}{asked}",
        date=time.strftime("%Y-%m-%d"),
        environments=tuple(environments),
        cached=scale.cached,
        pixels=_pixels(run for run in runs if run.variant.name in results),
    )


def setting(scale: Scale, variant: Variant) -> str:
    """Say in which settings a variant differs from the scale's base recipe.

    Returns:
        ``batch 64, warmup-epochs 1.2``; for a change of another method's recipe its name, and what
        the change is of that recipe: ``method simclr, epochs 12``.
    """
    base, own = scale.base, scale.base_of(variant)
    if own.model.method.name == base.model.method.name or variant.change is unchanged:
        return ", ".join(_changes(base, scale.changed(variant)))
    return ", ".join([f"method {own.model.method.name}", *_changes(own, scale.changed(variant))])


def _changes(base: TrainConfig, config: TrainConfig) -> Iterator[str]:
    before, after = flags_by_section(base), flags_by_section(config)
    for section in FIXED_SECTIONS:
        for name, value in after[section].items():
            if before[section].get(name) != value:
                yield _said(name.replace("_", "-"), value)


def write_record(path: Path, record: StudyRecord) -> None:
    """Write a record: JSON, a line for each of its numbers' lists.

    Raises:
        FastSiamError: the file cannot be written.
    """
    with written_for_user(path) as temporary:
        temporary.write_text(_lines(asdict(record)) + "\n")


def read_record(path: Path) -> StudyRecord:
    """Read a record.

    Raises:
        DataError: the file cannot be read, or is no record of a study.
    """
    with explained(DataError, f"cannot read {path}"):
        content = path.read_bytes()
    try:
        plain = parsed_json(content)
        environments = tuple(map(dict, plain.pop("environments")))
        record: StudyRecord = from_plain(StudyRecord, plain | {"environments": ()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no record of fastsiam study: {error}") from error
    return replace(record, environments=environments)


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _pixels(runs: Iterable[Run]) -> float | None:
    """Return kNN top-1 of the raw pixels, as an evaluation of any run with --baselines has it."""
    for run in runs:
        monitor = run.config.monitor
        for record in read_records(run.folder):
            for line in record.results if record.kind == "knn" else ():
                votes = min(monitor.knn_k, line["bank"]), monitor.knn_temperature
                if line["features"] == "pixels" and (line["k"], line["temperature"]) == votes:
                    return float(line["top1"])
    return None


def _lines(value: Any, indent: str = "") -> str:
    """Write plain values as JSON: what holds numbers or texts alone stands on one line."""
    deeper = indent + "  "
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple) or not value:
        return json.dumps(value, allow_nan=False)
    if isinstance(value, list | tuple) and not any(isinstance(x, Mapping) for x in inner):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(name)}: {_lines(one, deeper)}" for name, one in value.items()]
        begin, end = "{}"
    else:
        parts, (begin, end) = [_lines(one, deeper) for one in value], "[]"
    return f"{begin}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{end}"
