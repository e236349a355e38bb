"""The record of a study: its rows with the results of every seed, for tables and pictures.

``fastsiam study table NAME --json FILE`` writes one. Verdicts are not stored but computed from it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastsiam.config import TrainConfig
from fastsiam.config.setting import convert_value
from fastsiam.config.settings_files import RunSettings
from fastsiam.config.study import StudyConfig
from fastsiam.config.train import differences
from fastsiam.console import format_count
from fastsiam.errors import DataError
from fastsiam.files import atomic_write_for_user, os_errors_as, parse_json
from fastsiam.run.log import initial_spread
from fastsiam.run.records import read_records
from fastsiam.study.catalogue import ORIGINAL, STUDIES, VARIANTS, Row, Study
from fastsiam.study.runs import Run, images_digest, run_command
from fastsiam.study.scales import Measure, Scale

_DIGITS = 5
"""Significant digits of values in curves."""
_FLAT_LIST = re.compile(r"\[\n\s+([^\[\]{}]+)\n\s+\]")
"""Matches an indented JSON list of numbers or strings, one item per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of one run."""

    seed: int
    top1: float
    """Accuracy after the last epoch by the scale's measure, in percent; chance if diverged."""
    untrained: float
    """Top-1 accuracy of the network before training, in percent; chance if it was not measured."""
    z_std: float | None
    """Final std of the l2-normalised projections, times sqrt(d); None if the run diverged."""
    rank: float | None
    """Final effective rank of the projections; None if the run diverged."""
    loss: float | None
    """Final loss; None if the run diverged."""
    batch: int
    images: int
    """Number of training images in the kNN bank; 0 if the run ended before a kNN evaluation."""
    diverged: bool
    epochs: tuple[float, ...]
    """Epoch of each point of the curves of loss, z_std and rank."""
    loss_curve: tuple[float, ...]
    z_std_curve: tuple[float, ...]
    rank_curve: tuple[float, ...]
    knn_epochs: tuple[float, ...]
    """Epoch of each kNN evaluation; 0 is before training."""
    knn_curve: tuple[float, ...]
    """kNN top-1 accuracy at each of ``knn_epochs``, in percent."""
    initial_std: float | None = None
    """z_std of the untrained network; None if it was not measured."""
    centred: bool = True
    """Whether BN centres the projections, which keeps their z_std near 1 unless they collapse."""
    dim: int | None = None
    """Dimensions of the projections; None in records of earlier versions."""
    linear: float | None = None
    """Top-1 of the linear evaluation, in percent, if the measure is kNN; None if not evaluated."""
    images_digest: str = ""
    """Hash of the names of the training images; empty if they are unknown."""

    @property
    def gain(self) -> float:
        """Gain in top-1 accuracy over the untrained network, in percentage points."""
        return self.top1 - self.untrained


@dataclass(frozen=True, kw_only=True)
class RowRecord(Row):
    """A row of a study's table with its results."""

    setting: str
    """Settings that differ from the scale's recipe, as text."""
    results: tuple[Result, ...]
    """Results of the finished seeds."""

    @property
    def linear(self) -> list[float]:
        """Linear top-1 of each seed (chance if it diverged); empty if any seed lacks it."""
        accuracies = [one.top1 if one.diverged else one.linear for one in self.results]
        return [] if None in accuracies else [x for x in accuracies if x is not None]


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Study):
    """A study with its results at a scale."""

    rows: tuple[RowRecord, ...]
    scale: str
    network: str
    """Description of the scale's network and images."""
    measure: Measure
    chance: float
    epochs: int
    """Number of epochs of the base recipe."""
    command: str = ""
    """Command that reproduces the runs."""
    date: str
    environments: tuple[dict[str, Any], ...] = ()
    """Distinct ``fastsiam.environment`` records of the runs."""
    precisions: tuple[str, ...] = ()
    """Distinct precisions that the runs were trained in; empty if unknown."""
    cached: bool = False
    """Whether the additional linear evaluation used cached features."""
    pixels: float | None = None
    """kNN top-1 on raw pixels, in percent; None if no run was evaluated with ``--baselines``."""

    @property
    def every_result(self) -> list[Result]:
        """Results of all rows."""
        return [one for row in self.rows for one in row.results]

    @property
    def trained_epochs(self) -> str:
        """Length of its runs: "24 epochs", "12 to 96 epochs"; without runs, the recipe's."""
        ends = [one.knn_epochs[-1] for one in self.every_result if not one.diverged]
        low, high = min(ends, default=self.epochs), max(ends, default=self.epochs)
        return f"{low:g} to " * (low < high) + format_count(high, "epoch")

    @property
    def has_linear(self) -> bool:
        """Whether any seed has an additional linear evaluation."""
        return any(one.linear is not None for one in self.every_result)

    @property
    def seeds(self) -> list[int]:
        """Sorted seeds that all rows with results share."""
        seeds_by_row = [{one.seed for one in row.results} for row in self.rows if row.results]
        return sorted(set.intersection(*seeds_by_row)) if seeds_by_row else []

    @property
    def has_equal_seeds(self) -> bool:
        """Whether all rows with results have the same seeds."""
        return all(len(row.results) in (0, len(self.seeds)) for row in self.rows)


def read_result(run: Run) -> Result | None:
    """Read the results of a run; None if it is not finished.

    Raises:
        FastSiamError: a file cannot be read.
    """
    if not run.is_done:
        return None
    lines = run.metrics
    knn = [line for line in lines if line["kind"] == "knn"]
    train = [line for line in lines if line["kind"] == "train"]
    log_interval = run.config.run.log_every  # version 0.2 also logged when it was interrupted
    points = [line for line in train if line["step"] % log_interval == 0 or line is train[-1]]
    chance, diverged = run.scale.chance, run.is_diverged
    last: Mapping[str, Any] = points[-1] if points and not diverged else {}
    by_knn = run.scale.measure == "kNN top-1"
    untrained = knn[0]["top1"] if by_knn and knn and not knn[0]["epoch"] else chance
    accuracy = knn[-1]["top1"] if by_knn and knn else run.linear_top1
    return Result(
        seed=run.seed,
        top1=chance if diverged or accuracy is None else accuracy,
        untrained=untrained,
        z_std=last.get("z_std"),
        rank=last.get("rank"),
        loss=last.get("loss"),
        batch=run.config.optim.batch,
        images=knn[0]["bank"] if knn else 0,
        diverged=diverged,
        epochs=_column(points, "epoch"),
        loss_curve=_column(points, "loss"),
        z_std_curve=_column(points, "z_std"),
        rank_curve=_column(points, "rank"),
        knn_epochs=_column(knn, "epoch"),
        knn_curve=_column(knn, "top1"),
        initial_std=initial_spread(run.folder),
        centred=run.config.model.method.centred,
        dim=run.config.to_flags()["dim"],
        linear=run.linear_top1 if by_knn and not diverged else None,
        images_digest=images_digest(run.folder),
    )


def collect(study: Study, scale: Scale, runs: Sequence[Run], config: StudyConfig) -> StudyRecord:
    """Collect the record of a study from its finished runs.

    Raises:
        FastSiamError: a file cannot be read.
    """
    results: dict[str, list[Result]] = {}
    environments: list[dict[str, Any]] = []
    precisions = set()
    for run in runs:
        if (result := read_result(run)) is not None:
            results.setdefault(run.variant, []).append(result)
            settings = RunSettings.read(run.folder)
            precisions.add(settings.config.numerics.precision)
            if settings.environment not in environments:
                environments.append(settings.environment)
    rows = tuple(
        RowRecord(
            **vars(row),
            setting=setting(scale, row.variant),
            results=tuple(results.get(row.variant, ())),
        )
        for row in study.rows
    )
    record = StudyRecord(
        **vars(study) | {"rows": rows},
        scale=scale.name,
        network=scale.title,
        measure=scale.measure,
        chance=scale.chance,
        epochs=scale.base.optim.epochs,
        date=time.strftime("%Y-%m-%d"),
        environments=tuple(environments),
        precisions=tuple(sorted(precisions)),
        cached=scale.cached,
        pixels=_pixels(runs),
    )
    command = run_command(study.name, config)
    seeds = 1 + max(record.seeds, default=-1)
    command += f" --seeds {seeds}" if seeds not in (0, scale.seeds) else ""
    command += " --linear" if record.has_linear else ""
    return replace(record, command=command)


def setting(scale: Scale, variant: str) -> str:
    """Format the settings in which a variant differs from the scale's base recipe.

    Example: ``batch 64, warmup-epochs 1.2``. A variant that changes both the method and other
    settings is compared with that method's recipe: ``method simclr, epochs 12``.
    """
    base, origin, config = scale.base, scale.base_of(variant), scale.recipe_of(variant)
    if origin.model.method.name == base.model.method.name or VARIANTS[variant].keys() == {"method"}:
        return ", ".join(_changes(base, config))
    return ", ".join([f"method {origin.model.method.name}", *_changes(origin, config)])


def write_record(path: Path, record: StudyRecord) -> None:
    """Write a record as JSON, with each list of numbers or strings on one line.

    Raises:
        FastSiamError: the file cannot be written.
    """
    plain = asdict(record)
    del plain["panels"]  # the catalogue has them
    text = json.dumps({"study": plain.pop("name"), **plain}, indent=2, allow_nan=False)
    text = _FLAT_LIST.sub(lambda match: "[" + re.sub(r"\n\s+", " ", match[1]) + "]", text)
    with atomic_write_for_user(path) as temporary:
        temporary.write_text(text + "\n")


def read_record(path: Path) -> StudyRecord:
    """Read a record. The paper's claims and the picture's panels come from the current catalogue.

    Raises:
        DataError: the file cannot be read, or is not a record of a study.
    """
    with os_errors_as(DataError, f"cannot read {path}"):
        content = path.read_bytes()
    try:
        plain = parse_json(content)
        environments = tuple(map(dict, plain.pop("environments")))
        study = STUDIES[plain.pop("study")]
        claims = {row.variant: row.claims for row in study.rows}
        names = {"", ORIGINAL, *(row["variant"] for row in plain["rows"])}
        for row in plain["rows"]:
            row["claims"] = [x for x in claims.get(row["variant"], ()) if x.than in names]
        record: StudyRecord = convert_value(StudyRecord, plain | {"name": study.name}, "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a record of `fastsiam study`: {error}") from error
    return replace(record, environments=environments, panels=study.panels)


def _changes(base: TrainConfig, config: TrainConfig) -> Iterator[str]:
    changes = differences(base, config)
    for flag, value in config.to_flags().items():
        if flag in changes:
            name = flag.replace("_", "-")
            if isinstance(value, bool):
                yield name if value else f"no {name}"
            else:
                yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _column(lines: Iterable[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(float(f"{line[name]:.{_DIGITS}g}") for line in lines)


def _pixels(runs: Iterable[Run]) -> float | None:
    """Return kNN top-1 on raw pixels, if any run was evaluated with ``--baselines``."""
    for run in runs:
        monitor = run.config.monitor
        for record in read_records(run.folder):
            has_usual_images = record.kind == "knn" and run.has_usual_images(record)
            for line in record.results if has_usual_images else ():
                votes = min(monitor.knn_k, line["bank"]), monitor.knn_temperature
                if line["features"] == "pixels" and (line["k"], line["temperature"]) == votes:
                    return float(line["top1"])
    return None
