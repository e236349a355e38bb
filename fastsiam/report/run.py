"""One self-contained HTML page about a run: the curves of the paper's Fig. 2, speed, settings."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastsiam.bad_image_list import read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.flags import changes_text, flags_by_section, to_flags
from fastsiam.config.run_settings import RunSettings
from fastsiam.console import rounded
from fastsiam.errors import DataError
from fastsiam.files import written_for_user
from fastsiam.report import html as page
from fastsiam.report.evaluations import evaluations
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record, read_records

_CURVES = (
    ("train", "loss", "Loss", "negative cosine similarity; -1 is the minimum"),
    (
        "train",
        "z_std",
        "Std of the l2-normalised projections, times sqrt(d)",
        "1: spread over the sphere; 0: collapsed",
    ),
    ("knn", "top1", "kNN top-1 (%)", "frozen pool5 features"),
    (
        "train",
        "rank",
        "Effective rank of the projections",
        "dimensions in use; at most the smaller of batch and dim",
    ),
    ("train", "images_per_second", "Images per second", "an image with all its views; all ranks"),
    (
        "train",
        "data_wait",
        "Share of time waiting for data",
        "0: the loader keeps up; 1: nothing but waiting",
    ),
)

_OF_ONE_RUN = ("out", "resume", "rendezvous")
"""Settings that say where a run is, not what it does: runs are not compared by them."""


def _branch(at: Mapping[str, Any]) -> str:
    """Return where a run branched off another, for people."""
    changed = {name: (one["from"], one["to"]) for name, one in at["changed"].items()}
    point = f"branch of {at['run']} after step {at['step']:,} (epoch {rounded(at['epoch'])})"
    return f"{point}: {changes_text(changed, between=', ') or 'the same settings'}"


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page.

    Args:
        runs: run folders; all are compared in the first table and drawn in each chart, and the
            settings of the first one are listed.
        out: where the page goes.

    Raises:
        DataError: a folder holds no metrics or no settings.
        FastSiamError: the page cannot be written.
    """
    metrics = {}
    for run in runs:
        lines = read_metrics(run)
        if not lines:
            raise DataError(
                f"{run} is not a run folder, or has no metrics yet "
                f"(no lines in {run / 'metrics.jsonl'})"
            )
        metrics[_name(run, runs)] = lines
    settings = {name: RunSettings.read(run) for name, run in zip(metrics, runs, strict=True)}
    found = {name: read_records(run) for name, run in zip(metrics, runs, strict=True)}
    figures = "".join(
        page.figure(chart, "image/svg+xml", f"{title} over epochs", title, note)
        for kind, field, title, note in _CURVES
        if (chart := _chart(metrics, kind, field))
    )
    name, first = next(iter(settings.items()))
    body = (
        f"{_results(metrics, settings, found)}{_alarms(metrics)}"
        f'<h2>Curves</h2><div class="curves">{figures}</div>'
        f"{evaluations(found)}{_bad_images(dict(zip(metrics, runs, strict=True)))}"
        f"{page.heading('Settings', f'of {name}')}"
        f'<div class="settings">{_sections(first.config)}</div>'
        f"{page.heading('Machine', f'of {name}')}{_named(page.flat(first.environment))}"
    )
    facts = f"{name}: " * (len(runs) > 1) + _facts(first)
    text = page.whole(f"fastsiam: {', '.join(metrics)}", facts, body)
    with written_for_user(out) as temporary:
        temporary.write_text(text)
    return out


def _name(run: Path, runs: Sequence[Path]) -> str:
    """The folder's name, or its path where names repeat."""
    return run.name if len({r.resolve().name for r in runs}) == len(runs) and run.name else str(run)


def _words(value: Any) -> str:
    """Write a setting's value for people."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(_words, value)) or "none"
        case "" | None:
            return "none"
    return str(value)


def _named(values: Mapping[str, Any]) -> str:
    """Return a table of names and values."""
    return page.table((name, _words(value)) for name, value in values.items())


def _chart(metrics: dict[str, list[dict[str, Any]]], kind: str, field: str) -> bytes:
    """Draw one field over epochs for every run: an SVG, or nothing if no run has it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for name, lines in metrics.items():
        points = [(line["epoch"], line[field]) for line in lines if line["kind"] == kind]
        if points:
            marker = "o" if kind == "knn" or len(points) == 1 else None
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                linewidth=1.4,
                marker=marker,
                markersize=3.5,
                clip_on=False,  # a point on the edge is drawn whole
            )
    if not axes.lines:
        return b""
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if field in ("z_std", "data_wait", "images_per_second", "rank"):
        axes.set_ylim(bottom=0)
    if field == "data_wait":
        axes.set_ylim(top=1)
    if len(metrics) > 1:
        axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def _facts(settings: RunSettings) -> str:
    config, environment = settings.config, settings.environment
    where = ", ".join(environment["gpus"]) or f"{environment['cpu']}, {environment['cores']} cores"
    return (
        f"{config.model.method.title}, {config.model.backbone}, recipe {settings.recipe}, "
        f"pipeline {config.data.pipeline}, "
        f"global batch {config.optim.batch}, {config.optim.epochs} epochs; {where}; "
        f"fastsiam {environment['fastsiam']}, torch {environment['packages']['torch']}"
        f"{f'; {_branch(settings.branch)}' if settings.branch else ''}"
    )


def _results(
    metrics: Mapping[str, list[dict[str, Any]]],
    settings: Mapping[str, RunSettings],
    found: Mapping[str, Sequence[Record]],
) -> str:
    """Return a table of the settings in which runs differ, and where each stands at its end."""
    flags = {name: to_flags(own.config) for name, own in settings.items()}
    first = next(iter(flags.values()))
    differing = [
        flag
        for flag in dict.fromkeys(flag for own in flags.values() for flag in own)
        if flag not in _OF_ONE_RUN
        and any(own.get(flag) != first.get(flag) for own in flags.values())
    ]
    rows = []
    for name, lines in metrics.items():
        train = [line for line in lines if line["kind"] == "train"]
        cells = [name, *(_words(flags[name][x]) if x in flags[name] else "" for x in differing)]
        if train:
            last = train[-1]
            speeds = sorted(line["images_per_second"] for line in train)
            eager = " (not compiled)" if settings[name].compiled is False else ""
            cells += [
                f"{last['epoch']:.2f}",
                f"{last['loss']:.4f}",
                f"{last['z_std']:.3f}",
                f"{last['rank']:.1f}",
                f"{speeds[len(speeds) // 2]:,.0f}{eager}",
            ]
        else:
            cells += ["-"] * 5
        cells.append(_knn_text([x for x in lines if x["kind"] == "knn"], found[name]))
        rows.append(cells)
    heads = ("epochs", "loss", "std", "rank", "images/s (median)", "kNN top-1 (%)")
    options = (f"--{flag.replace('_', '-')}" for flag in differing)
    table = page.table(rows, ("run", *options, *heads))
    same = len(rows) > 1 and not differing
    return table + "<p>All runs have the same settings.</p>" * same


def _knn_text(monitored: Sequence[dict[str, Any]], records: Sequence[Record]) -> str:
    """Return the accuracies of the monitor's first and last epoch, and of the last evaluated one.

    Args:
        monitored: lines of the run's metrics.
        records: of the run's evaluations.
    """
    parts = []
    if monitored:
        last = monitored[-1]
        parts.append(
            f"{_top1_text(monitored[0])}, {_top1_text(last)} "
            f"(k {last['k']}, T {last['temperature']:g}, bank {last['bank']:,})"
        )
    trained = [x for x in records if x.kind == "knn" and not x.network.untrained]
    newest = max((x.network.epoch or 0.0 for x in trained), default=0.0)
    for record in (x for x in trained if (x.network.epoch or 0.0) == newest):
        line = record.first_with("trained")
        parts.append(
            f"evaluated: {_top1_text(line)} "
            f"(k {line['k']}, T {line['temperature']:g}, bank {record.data.train:,})"
        )
    return "; ".join(parts) or "not measured"


def _top1_text(line: Mapping[str, Any]) -> str:
    """Return an accuracy with its epoch, if that is known."""
    at = f" at epoch {rounded(line['epoch'])}" if "epoch" in line else ""
    return f"{line['top1']:.2f}{at}"


def _alarms(metrics: dict[str, list[dict[str, Any]]]) -> str:
    """List the warnings of all runs about their machines; empty without warnings."""
    lines = [
        f"{f'{name}, ' if len(metrics) > 1 else ''}epoch {rounded(line['epoch'])}: {line['text']}"
        for name, found in metrics.items()
        for line in found
        if line["kind"] == "alarm"
    ]
    return page.heading("Alarms", "About the machine.") + page.listing(lines) if lines else ""


def _bad_images(runs: Mapping[str, Path]) -> str:
    """List the images in whose place others were shown; nothing where there are none."""
    rows = [
        (name, f"{own.index:,}", own.name, own.reason, f"{own.epoch}", f"{own.step:,}")
        for name, run in runs.items()
        for own in read_bad_images(run)
    ]
    if not rows:
        return ""
    facts = f"In the place of each of these {len(rows):,} another image was shown from then on."
    heads = ("run", "position", "image", "what is wrong", "epoch", "steps before")
    return page.heading("Bad images", facts) + page.table(rows, heads)


def _sections(config: TrainConfig) -> str:
    """Tables of all settings by their flat names, which are those of the command line."""
    return "".join(
        f"<div>{page.subheading(section)}{_named(settings)}</div>"
        for section, settings in flags_by_section(config).items()
    )
