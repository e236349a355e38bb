"""The picture of a study: curves over epochs and final accuracy for each row."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fastsiam.files import atomic_write_for_user
from fastsiam.report import drawing
from fastsiam.report.drawing import BLUE, GRAY, GREEN, INK, ORANGE, PINK, QUIET, SKY, VERMILION
from fastsiam.study.record import Result, RowRecord, StudyRecord
from fastsiam.study.result_table import spelled_seeds
from fastsiam.study.verdicts import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIANT_COLOURS = (ORANGE, GREEN, PINK, SKY, VERMILION, GRAY)
_TITLES = {
    "loss": "loss",
    "std": "std of the l2-normalised output, x √d",
    "rank": "effective rank of the output",
    "kNN": "kNN top-1, %",
}
_SLOT, _PANEL, _AXIS = 0.46, 0.95, 0.35
"""Heights in inches: a bar with its name, a panel of curves, and the labels below an axis."""
_THICKEST, _NAME = 0.3, 0.3
"""Heights in inches: the thickest bar, and the name above a bar."""


def write_picture(path: Path, record: StudyRecord) -> None:
    """Write the picture of a study as a PNG file, 900 pixels wide.

    Raises:
        FastSiamError: the file cannot be written.
    """
    content = drawing.png(picture(record))
    with atomic_write_for_user(path) as temporary:
        temporary.write_bytes(content)


def picture(record: StudyRecord) -> Figure:
    """Draw a study: curves on the left, bars of the final accuracy on the right.

    A curve is the mean over seeds; its band spans the lowest to the highest. A cross marks the end
    of a seed that diverged. A bar is the mean over seeds with its 95% confidence interval; each dot
    is a seed. Rows without results are marked "not run".
    """
    from matplotlib.ticker import MaxNLocator

    panels, colours = record.panels, _colours(record)
    height = max(_PANEL * len(panels), _SLOT * len(record.rows)) + _AXIS
    figure = drawing.canvas(f"{record.title} ({record.source})", _caption(record), height)
    layout = figure.add_gridspec(len(panels), 2, width_ratios=(1, 1.05))
    first: Axes | None = None
    for index, panel in enumerate(panels):
        axes = drawing.plain(figure.add_subplot(layout[index, 0], sharex=first))
        first = first or axes
        _curves(axes, record, panel, colours)
        axes.tick_params(labelbottom=panel is panels[-1])
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    slot = (height - _AXIS) / len(record.rows)
    _bars(drawing.plain(figure.add_subplot(layout[:, 1])), record, colours, slot=slot)
    return figure


def _caption(record: StudyRecord) -> str:
    seeds = spelled_seeds(record.seeds) or "none yet"
    seeds = seeds if record.has_equal_seeds else "each row's"
    lines = f"dotted: chance, {record.chance:g}"
    if (untrained := _untrained(record)) is not None:
        lines = f"dashed: untrained network, {untrained:.1f}; {lines}"
    return (
        f"Ours: {record.measure} of {record.network}, {record.trained_epochs}; "
        f"seeds: {seeds}; {record.date}. The paper's, beside the names: {record.figure}. Curves "
        "and bars: mean over seeds; bands: lowest to highest; whiskers: 95% confidence interval of "
        f"the mean; dots: seeds; {lines}."
    )


def _colours(record: StudyRecord) -> dict[str, str]:
    """Assign a colour to each variant; the reference row has the same one in every picture."""
    variants = [row.variant for row in record.rows if row.variant != record.reference]
    return {record.reference: BLUE} | dict(zip(variants, cycle(_VARIANT_COLOURS), strict=False))


def _curves(axes: Axes, record: StudyRecord, panel: str, colours: Mapping[str, str]) -> None:
    """Plot one quantity over epochs for each row."""
    for row in record.rows:
        curves = [curve for one in row.results if (curve := _curve(one, panel))]
        colour = colours[row.variant]
        if epochs := sorted({epoch for curve in curves for epoch, _ in curve}):
            values = [[x for curve in curves for at, x in curve if at == epoch] for epoch in epochs]
            means = [fmean(column) for column in values]
            axes.plot(epochs, means, color=colour, linewidth=1.4, markersize=3,
                      marker="o" if panel == "kNN" else None, clip_on=False)  # fmt: skip
            if len(curves) > 1:
                lows, highs = [min(column) for column in values], [max(column) for column in values]
                axes.fill_between(epochs, lows, highs, color=colour, alpha=0.15, linewidth=0)
        for one in row.results:
            if one.diverged and (curve := _curve(one, panel)):
                axes.plot(*curve[-1], color=colour, marker="x", markersize=6)
    if panel == "std":
        axes.axhline(1, color=QUIET, linestyle=":", linewidth=0.8)
        axes.set_ylim(0, 1.1)
    elif panel != "loss":
        axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(_TITLES[panel], fontsize=7, color=QUIET, loc="left", pad=3)
    axes.grid(axis="y", alpha=0.3)


def _curve(one: Result, panel: str) -> list[tuple[float, float]]:
    """Return a seed's finite points as (epoch, value)."""
    epochs, values = {
        "loss": (one.epochs, one.loss_curve),
        "std": (one.epochs, one.z_std_curve),
        "rank": (one.epochs, one.rank_curve),
        "kNN": (one.knn_epochs, one.knn_curve),
    }[panel]
    return [point for point in zip(epochs, values, strict=True) if isfinite(point[1])]


def _bars(axes: Axes, record: StudyRecord, colours: Mapping[str, str], *, slot: float) -> None:
    """Draw each row's name, the paper's result and a bar, in a slot of ``slot`` inches."""
    edge = 2 * record.chance
    height = min(_THICKEST, slot - _NAME) / slot
    for y, row in enumerate(record.rows):
        name, bar = y - height / 2, y + 0.1 / slot
        drawing.note(axes, 0, name + 0.06 / slot, _name(row), gap=0, va="bottom")
        if row.results:
            edge = max(edge, _bar(axes, bar, row, colours[row.variant], height=height))
        else:
            drawing.note(axes, 0, bar, "not run")
    axes.axvline(record.chance, color=INK, linestyle=":", linewidth=0.9)
    if (untrained := _untrained(record)) is not None:
        axes.axvline(untrained, color=INK, linestyle="--", linewidth=0.9)
    axes.set_xlim(0, 1.15 * edge)
    axes.set_ylim(len(record.rows) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_xlabel(f"{record.measure}, %")


def _bar(axes: Axes, y: float, row: RowRecord, colour: str, *, height: float) -> float:
    """Draw a row's bar; return its right end, including whiskers and dots."""
    values = [one.top1 for one in row.results]
    mean, bounds, end = fmean(values), interval(values), max(values)
    axes.barh(y, mean, height, color=colour, alpha=0.85)
    if bounds:
        low, high = max(0, bounds.low), min(100, bounds.high)
        axes.plot([low, high], [y, y], color=INK, linewidth=1)
        end = max(end, high)
    for one in row.results:
        axes.plot(one.top1, y, color=INK, marker="x" if one.diverged else "o", markersize=3,
                  markerfacecolor="white", markeredgewidth=0.8, zorder=6)  # fmt: skip
    diverged = sum(one.diverged for one in row.results)
    drawing.note(axes, end, y, f"{mean:.1f}" + (f", {diverged} diverged" if diverged else ""))
    return end


def _untrained(record: StudyRecord) -> float | None:
    """Return the mean top-1 of the untrained networks; None if it was not measured."""
    accuracies = [one.untrained for one in record.every_result]
    return fmean(accuracies) if accuracies and max(accuracies) > record.chance else None


def _name(row: RowRecord) -> str:
    """Return a row's title with the paper's result, on two lines if they are long."""
    if row.paper is None:
        return row.title
    paper = f"(paper: {row.paper})"
    return f"{row.title}{' ' if len(row.title) + len(paper) < 50 else chr(10)}{paper}"
