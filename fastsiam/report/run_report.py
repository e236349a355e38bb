"""HTML report of training runs: the curves of the paper's Fig. 2, speed, evaluations, settings."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median_high
from typing import Any

from fastsiam.bad_image_list import read_bad_images
from fastsiam.config.settings_files import RunSettings
from fastsiam.console import format_count, format_number, text_of
from fastsiam.errors import DataError
from fastsiam.files import atomic_write_for_user, value_errors_as_data_error
from fastsiam.interchange.card import describe_images, preprocessing
from fastsiam.markdown import format_mean
from fastsiam.report.drawing import escape
from fastsiam.report.page import Figure, Section, Table, flat, render
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record, read_records

_CURVES = {
    "loss": ("Loss", "SimSiam and FastSiam: negative cosine similarity; -1 is the minimum"),
    "z_std": (
        "Std of the l2-normalised projections, times sqrt(d)",
        "1: spread over the sphere; 0: collapsed",
    ),
    "top1": ("kNN top-1 (%)", "frozen pool5 features"),
    "rank": (
        "Effective rank of the projections",
        "dimensions in use; at most dim, 1,024, and the images of a micro-batch on all ranks",
    ),
    "images_per_second": (
        "Images per second",
        "over all ranks; an image counts once, with all its views",
    ),
    "data_wait": (
        "Share of time waiting for data",
        "0: the loader keeps up; 1: training only waits",
    ),
}
"""Title and note of each chart, by the field of metrics.jsonl."""

_NUMBERS = {
    "train": ("epoch", *(_CURVES.keys() - {"top1"})),
    "knn": ("epoch", "top1", "k", "temperature", "bank"),
    "alarm": ("epoch",),
}
"""Numeric fields that the page shows, by kind of line in metrics.jsonl."""

_OF_ONE_RUN = ("out", "resume", "rendezvous")
"""Settings about where a run is, not what it does: the comparison of runs leaves them out."""


_TITLES = {"knn": "kNN", "linear": "Linear", "finetune": "Fine-tuning", "detect": "Detection"}
_COLUMNS = {"top1": "top-1 (%)", "top5": "top-5 (%)", "temperature": "T", "lr": "base rate"}
"""Column titles for the results of a record; other columns keep the names of their fields."""
_CONDITIONS = ("task", "detector", "optimizer", "batch", "epochs", "cached", "trials")
"""Fields of a record's protocol that the page shows."""
_IF_DIFFERENT = (
    *("seed", "storage", "momentum", "weight_decay", "lars_trust", "scale_min"),
    *("mean", "std", "exif", "alpha", "precision"),
)
"""Fields of a record's protocol and images that the page shows if evaluations differ in them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Contents of a run's folder."""

    name: str
    folder: Path
    metrics: list[dict[str, Any]]
    settings: RunSettings
    records: Sequence[Record]
    history: Sequence[str]
    """Where the run branched off, and how it was extended."""

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl of one kind."""
        return [line for line in self.metrics if line["kind"] == kind]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write an HTML report of one or more runs; return its path.

    Args:
        runs: run folders. All are compared in the first table and drawn in each chart. Settings and
            machine are those of the first run.
        out: path of the HTML file.

    Raises:
        DataError: a folder has no metrics or no settings.
        FastSiamError: the page cannot be written.
    """
    loaded_runs = [_read(folder, runs) for folder in runs]
    first = loaded_runs[0]
    sections = [
        _results(loaded_runs),
        _alarms(loaded_runs),
        Section(title="Curves", figures=curves(loaded_runs), columns=True),
        Section(
            title="Evaluations",
            tables=evaluation_tables({run.name: run.records for run in loaded_runs}),
        ),
        _bad_images(loaded_runs),
        Section(
            title="Settings",
            facts=f"of {first.name}",
            tables=[
                Table.of(settings.items(), title=section)
                for section, settings in first.settings.config.flags_by_section().items()
            ],
            columns=True,
        ),
        Section(
            title="Machine",
            facts=f"of {first.name}",
            tables=[Table.of(flat(first.settings.environment).items())],
        ),
    ]
    text = render(
        f"fastsiam: {', '.join(run.name for run in loaded_runs)}",
        f"{first.name}: {_facts(first)}",
        sections,
    )
    with atomic_write_for_user(out) as temporary:
        temporary.write_text(text, "utf-8")
    return out


def _read(folder: Path, runs: Sequence[Path]) -> Run:
    """Read a run; its name is its folder's name, or its path if several folders have that name."""
    lines = read_metrics(folder, numbers=_NUMBERS)
    if not lines:
        raise DataError(
            f"{folder} is not a run folder, or has no metrics yet "
            f"(no lines in {folder / 'metrics.jsonl'})"
        )
    unique = len({run.resolve().name for run in runs}) == len(runs) and folder.name
    name = folder.name if unique else str(folder)
    settings = RunSettings.read(folder)
    with value_errors_as_data_error(folder / "config.json"):
        history = settings.history(full_paths=True)
    return Run(name, folder, lines, settings, read_records(folder), history)


def curves(runs: Sequence[Run]) -> list[Figure]:
    """Draw a chart over epochs of each metric that at least one run has."""
    return [
        Figure(chart, "image/svg+xml", f"{title} over epochs", title, note)
        for field, (title, note) in _CURVES.items()
        if (chart := _chart(runs, field))
    ]


def _chart(runs: Sequence[Run], field: str) -> bytes:
    """Draw one field of all runs over epochs: an SVG, or b"" if no run has it."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(5.2, 2.9), layout="constrained")
    axes = canvas.add_subplot()
    for run in runs:
        lines = run.lines("knn" if field == "top1" else "train")
        if lines:
            axes.plot(
                [line["epoch"] for line in lines],
                [line[field] for line in lines],
                label=escape(f" {run.name}"),  # matplotlib hides labels that begin with "_"
                linewidth=1.4,
                marker="o" if field == "top1" or len(lines) == 1 else None,
                markersize=3.5,
                clip_on=False,  # draw points on the edge completely
            )
    if not axes.lines:
        return b""
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if field not in ("loss", "top1"):
        axes.set_ylim(0, 1 if field == "data_wait" else None)
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg")
    return buffer.getvalue()


def _facts(run: Run) -> str:
    config, environment = run.settings.config, run.settings.environment
    cores = f"{environment['cpu']}, {format_count(environment['cores'], 'core')}"
    machine = ", ".join(environment["gpus"]) or cores
    parts = [
        f"{config.model.method.title}, {config.model.backbone}, recipe {run.settings.recipe}, "
        f"pipeline {config.data.pipeline}, "
        f"global batch {config.optim.batch}, {format_count(config.optim.epochs, 'epoch')}",
        machine,
        f"fastsiam {environment['fastsiam']}, torch {environment['packages']['torch']}",
        *run.history,
    ]
    return "; ".join(parts)


def _results(runs: Sequence[Run]) -> Section:
    """Compare the settings and histories in which runs differ, and each run's last metrics."""
    values = [run.settings.config.to_flags() | {"history": "; ".join(run.history)} for run in runs]
    differing = [
        name
        for name in dict.fromkeys(chain(*values))
        if name not in _OF_ONE_RUN and any(x.get(name) != values[0].get(name) for x in values)
    ]
    rows = [
        [
            run.name,
            *(text_of(of_run[name]) if name in of_run else "" for name in differing),
            *_last_figures(run),
            _knn_text(run),
        ]
        for run, of_run in zip(runs, values, strict=True)
    ]
    options = [x if x == "history" else f"--{x.replace('_', '-')}" for x in differing]
    heads = ("epochs", "loss", "std", "rank", "images/s (median)", "kNN top-1 (%)")
    facts = "All runs have the same settings." if len(runs) > 1 and not options else ""
    return Section(tables=[Table(rows, ("run", *options, *heads), facts=facts)])


def _last_figures(run: Run) -> list[str]:
    lines = run.lines("train")
    if not lines:
        return ["-"] * 5
    last = lines[-1]
    speed = median_high(line["images_per_second"] for line in lines)
    return [
        f"{last['epoch']:.2f}",
        f"{last['loss']:.4f}",
        f"{last['z_std']:.3f}",
        f"{last['rank']:.1f}",
        f"{speed:,.0f}{' (not compiled)' if run.settings.compiled is False else ''}",
    ]


def _knn_text(run: Run) -> str:
    """Format the kNN monitor's first and last accuracy, and those of the newest evaluations."""

    def top1(line: Mapping[str, Any]) -> str:
        return f"{line['top1']:.2f} at epoch {format_number(line['epoch'])}"

    def votes(line: Mapping[str, Any]) -> str:
        return f"(k {line['k']}, T {line['temperature']:g}, bank {line['bank']:,})"

    parts, config = [], run.settings.config
    if monitored := run.lines("knn"):
        first, last = monitored[0], monitored[-1]
        figures = dict.fromkeys((top1(first), top1(last)))  # the same if there is only one
        parts.append(f"{', '.join(figures)} {votes(last)}")
    trained = [x for x in run.records if x.kind == "knn" and not x.network.untrained]
    newest = max((x.network.epoch or 0.0 for x in trained), default=0.0)
    for record in (x for x in trained if (x.network.epoch or 0.0) == newest):
        line = record.first_with("trained") | {"epoch": newest}
        data = f" on {record.data.other_data}" if record.data.other_data else ""
        unusual = ", ".join(preprocessing(record, config))
        end = f" with {unusual}" if unusual else ""
        parts.append(f"evaluated{data}: {top1(line)} {votes(line)}{end}")
    return "; ".join(parts) or "not measured"


def evaluation_tables(records: Mapping[str, Sequence[Record]]) -> list[Table]:
    """Create tables for each kind of evaluation, with a row for each result.

    Args:
        records: evaluation records, by the run's name.

    Returns:
        A table for each kind and each set of images, which the line above the table describes.
    """
    tables = []
    for kind, title in _TITLES.items():
        groups: dict[str, list[dict[str, str]]] = {}
        for run, run_records in records.items():
            for record in run_records:
                if record.kind == kind:
                    groups.setdefault(_conditions(record), []).extend(_rows_of(run, record))
        all_rows = list(chain(*groups.values()))
        hidden = {name for name in _IF_DIFFERENT if len({row.get(name) for row in all_rows}) == 1}
        for facts, rows in groups.items():
            heads = [name for name in dict.fromkeys(chain(*rows)) if name not in hidden]
            cells = [[row.get(name, "") for name in heads] for row in rows]
            tables.append(Table(cells, heads, title, facts))
    return tables


def _conditions(record: Record) -> str:
    """Describe an evaluation's images, and a detector's differences from the paper's protocol."""
    images = record.images
    text = describe_images(record.data, full_paths=True)
    text += f"; shorter side {images.resize}"
    text += f", crop {images.crop}" if images.crop else ""  # detectors see whole images
    differences = record.protocol.get("differences")
    return f"{text}; unlike the paper: {text_of(differences)}" if differences else text


def _rows_of(run: str, record: Record) -> Iterator[dict[str, str]]:
    """Yield a row for each result; for detectors, the mean and standard deviation over trials."""
    network, conditions = record.network, asdict(record.images) | record.protocol
    epoch = "untrained" if network.untrained else format_number(network.epoch or 0)
    results: list[dict[str, Any]] = record.results
    if record.kind == "detect":
        means, _ = record.over_trials
        results = [{name: format_mean([x[name] for x in results], 1) for name in means}]
    condition_texts = {
        name: text_of(conditions[name])
        for name in (*_CONDITIONS, *_IF_DIFFERENT)
        if conditions.get(name) not in (None, "")
    }
    for result in results:
        figures = {
            _COLUMNS.get(name, name): f"{value:.2f}" if "top" in name else text_of(value)
            for name, value in result.items()
            if name != "epoch"
        }
        yield {
            "run": run,
            "epoch": epoch if result.get("features", "trained") == "trained" else "",
            **figures,
            **condition_texts,
            "on": record.date,
        }


def _alarms(runs: Sequence[Run]) -> Section:
    """List the warnings that all runs logged about their machines."""
    rows = [
        (f"{run.name}, epoch {format_number(line['epoch'])}: {line.get('text')}",)
        for run in runs
        for line in run.lines("alarm")
    ]
    return Section(title="Alarms", facts="About the machine.", tables=[Table(rows)])


def _bad_images(runs: Sequence[Run]) -> Section:
    """List the bad images of all runs, which were replaced by other images."""
    rows = [
        (run.name, f"{one.index:,}", one.name, one.reason, f"{one.epoch}", f"{one.step:,}")
        for run in runs
        for one in read_bad_images(run.folder)
    ]
    heads = ("run", "position", "image", "reason", "epoch", "steps before")
    facts = f"Each of these {len(rows):,} images was replaced by another one from then on."
    return Section(title="Bad images", facts=facts, tables=[Table(rows, heads)])
