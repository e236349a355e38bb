"""One self-contained HTML page about a run: the curves of the paper's Fig. 2, speed, settings."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsiam.bad_images import read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.flags import FIXED_SECTIONS, changes_text, flags_by_section
from fastsiam.console import rounded
from fastsiam.errors import DataError
from fastsiam.evaluate.records import read_records
from fastsiam.files import parsed_json, written_for_user
from fastsiam.report import html as page
from fastsiam.report.evaluations import evaluations
from fastsiam.training.log import read_metrics

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


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a run was made with: its ``config.json``, of this version or an older one."""

    recipe: str
    config: TrainConfig
    environment: dict[str, Any]
    branch: str
    """Which run it branched off, for people; empty if none."""

    @classmethod
    def of(cls, run: Path) -> _Settings:
        """Read the settings of a run's folder.

        Raises:
            DataError: they are missing or damaged.
        """
        path = run / "config.json"
        try:
            found = parsed_json(path.read_text())
            config = TrainConfig.from_dict(found["config"])
            return cls(found["recipe"], config, found["environment"], _branch(found))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read the settings of the run, {path}: {error}") from error


def _branch(found: Mapping[str, Any]) -> str:
    """Return where a run branched off another, for people; empty if it did not."""
    if "branch" not in found:
        return ""
    at = found["branch"]
    changed = {name: (one["from"], one["to"]) for name, one in at["changed"].items()}
    point = f"branch of {at['run']} after step {at['step']:,} (epoch {rounded(at['epoch'])})"
    return f"{point}: {changes_text(changed, between=', ') or 'the same settings'}"


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page.

    Args:
        runs: run folders; the first one's settings are shown, all are drawn in each chart.
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
    settings = _Settings.of(runs[0])
    first, *others = metrics
    changes = "".join(
        _changes(first, settings.config, other, _Settings.of(run).config)
        for other, run in zip(others, runs[1:], strict=True)
    )
    found = {name: read_records(run) for name, run in zip(metrics, runs, strict=True)}
    figures = "".join(
        page.figure(chart, "image/svg+xml", f"{title} over epochs", title, note)
        for kind, field, title, note in _CURVES
        if (chart := _chart(metrics, kind, field))
    )
    body = (
        f'{_results(metrics)}{_alarms(metrics)}<h2>Curves</h2><div class="curves">{figures}</div>'
        f"{changes}{evaluations(found)}{_bad_images(dict(zip(metrics, runs, strict=True)))}"
        f'<h2>Settings</h2><div class="settings">{_sections(settings.config)}</div>'
        f"<h2>Machine</h2>{_named(page.flat(settings.environment))}"
    )
    text = page.whole(f"fastsiam: {', '.join(metrics)}", _facts(settings), body)
    with written_for_user(out) as temporary:
        temporary.write_text(text)
    return out


def _name(run: Path, runs: Sequence[Path]) -> str:
    """The folder's name, or its path where names repeat."""
    return run.name if len({r.resolve().name for r in runs}) == len(runs) and run.name else str(run)


def _changes(first: str, its: TrainConfig, name: str, config: TrainConfig) -> str:
    """Say in which settings another run trained something different from the first."""
    before, after = (
        {flag: x for section in FIXED_SECTIONS for flag, x in flags_by_section(c)[section].items()}
        for c in (its, config)
    )
    lines = [
        f"{flag.replace('_', '-')}: {_words(after.get(flag))}; "
        f"in {first} {_words(before.get(flag))}"
        for flag in before | after
        if before.get(flag) != after.get(flag)
    ]
    if not lines:
        return page.heading(f"{name} beside {first}", "It was trained with the same settings.")
    facts = f"It was trained with other settings ({len(lines)}):"
    return page.heading(f"{name} beside {first}", facts) + page.listing(lines)


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
                *zip(*points, strict=True), label=name, linewidth=1.4, marker=marker, markersize=3.5
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


def _facts(settings: _Settings) -> str:
    config, environment = settings.config, settings.environment
    where = ", ".join(environment["gpus"]) or f"{environment['cpu']}, {environment['cores']} cores"
    return (
        f"{config.model.method.title}, {config.model.backbone}, recipe {settings.recipe}, "
        f"pipeline {config.data.pipeline}, "
        f"global batch {config.optim.batch}, {config.optim.epochs} epochs; {where}; "
        f"fastsiam {environment['fastsiam']}, torch {environment['packages']['torch']}"
        f"{'; ' * bool(settings.branch)}{settings.branch}"
    )


def _results(metrics: dict[str, list[dict[str, Any]]]) -> str:
    """A table of where each run stands at its last line."""
    rows = []
    for name, lines in metrics.items():
        train = [line for line in lines if line["kind"] == "train"]
        knn = [line for line in lines if line["kind"] == "knn"]
        cells = [name]
        if train:
            last = train[-1]
            speeds = sorted(line["images_per_second"] for line in train)
            cells += [
                f"{last['epoch']:.2f}",
                f"{last['loss']:.4f}",
                f"{last['z_std']:.3f}",
                f"{last['rank']:.1f}",
                f"{speeds[len(speeds) // 2]:,.0f}",
            ]
        else:
            cells += ["-"] * 5
        if knn:
            best = knn[-1]
            cells.append(
                f"{knn[0]['top1']:.2f} at epoch {rounded(knn[0]['epoch'])}, "
                f"{best['top1']:.2f} at epoch {rounded(best['epoch'])} "
                f"(k {best['k']}, T {best['temperature']:g}, bank {best['bank']:,})"
            )
        else:
            cells.append("not measured")
        rows.append(cells)
    heads = ("run", "epochs", "loss", "std", "rank", "images/s (median)", "kNN top-1 (%)")
    return page.table(rows, heads)


def _alarms(metrics: dict[str, list[dict[str, Any]]]) -> str:
    """List the alarms of all runs; nothing if there are none."""
    lines = [
        f"{f'{name}, ' if len(metrics) > 1 else ''}epoch {rounded(line['epoch'])}: {line['text']}"
        for name, found in metrics.items()
        for line in found
        if line["kind"] == "alarm"
    ]
    return page.heading("Alarms", "What went wrong slowly.") + page.listing(lines) if lines else ""


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
