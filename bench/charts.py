"""The charts of what was measured."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fastsiam.bench import drawing
from fastsiam.bench.cases import title_of
from fastsiam.bench.records import Record, grouped
from fastsiam.bench.timing import UNSTEADY
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.report.drawing import INK, QUIET, apart, note, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = ("decode", "crop", "photometric")
"""What an image goes through on its way into a batch."""

_PART_COLOURS = ("#2b3a67", "#8fa3c8", "#f0c75e")


def charts(records: Sequence[Record], run: Sequence[Record] = ()) -> dict[str, Figure]:
    """Draw the records of one case.

    Args:
        records: of one case.
        run: all records of the same run, for what takes several cases.

    Returns:
        The charts by name: that of the case, "stages", or "sweep-" and what is varied.
    """
    case = records[0].case
    if case == "sweep":
        overs = grouped(records, lambda one: str(one.facts["over"]))
        return {plain_name(f"sweep-{over}"): _sweep(over, of) for over, of in overs.items()}
    if case == "startup":
        return {case: _stacks(title_of(case), _startup(records), "seconds", records[0])}
    shown = [one for one in records if one.images]
    if case == "peers":
        shown.sort(key=lambda one: -one.images_per_second)
    found = {plain_name(case): _bars(shown)} if shown else {}
    if case == "loader" and (parts := stages(run)):
        unit = "milliseconds of processor time for an image, both views"
        found["stages"] = _stacks("Where the processor time goes", parts, unit, records[0])
    return found


def front_charts(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw the speeds of libraries for the first screen of a page: bars and figures alone.

    Args:
        records: of the case "peers".

    Returns:
        A chart for each of ``drawing.THEMES``: "peers-light", "peers-dark".
    """
    records = sorted(records, key=lambda one: -one.images_per_second)
    return {f"peers-{name}": _front(records, theme) for name, theme in drawing.THEMES.items()}


def _front(records: Sequence[Record], theme: drawing.Theme) -> Figure:
    """Draw bars, the fastest at the top, with the speed of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 0.26 * len(records) + 0.1), layout="constrained")
    axes = figure.add_subplot()
    for y, one in enumerate(records):
        axes.barh(y, one.images_per_second, 0.68, color=theme.bar(one))
        unsteady = f" (±{one.spread:.0%})" if one.unsteady else ""
        axes.annotate(
            drawing.short(one.images_per_second) + unsteady,
            (one.images_per_second, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=theme.ink,
        )
    axes.set_yticks(range(len(records)), [drawing.tick(one.name) for one in records])
    axes.tick_params(length=0, labelsize=8.5, colors=theme.ink)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, 1.12 * records[0].images_per_second)
    axes.set_ylim(len(records) - 0.5, -0.5)
    return figure


def stages(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Take the processor time of loading apart.

    Args:
        records: of one run; those of the cases "loader" and "decode" count.

    Returns:
        Milliseconds of an image by stage (``STAGES``), for each pipeline and, where it is not the
        original images, the form in which they are stored. Only those of which all parts were
        measured, and which decode on the CPU, are among them.
    """
    decode, crops, views = {}, {}, {}
    for one in records:
        milliseconds = 1000 * one.cpu_seconds_per_image
        stored, what = one.facts.get("stored", "original"), one.facts.get("what")
        if one.case == "decode":
            decode[one.name.partition(",")[0], stored] = milliseconds
        elif one.case == "loader" and what == "crops":
            crops[one.pipeline, stored] = milliseconds
        elif one.case == "loader" and what == "views" and (decoder := _decoder(one)):
            views[one.pipeline, stored] = decoder, milliseconds
    found = {}
    for (pipeline, stored), (decoder, whole) in views.items():
        bare, cropped = decode.get((decoder, stored)), crops.get((pipeline, stored))
        if bare is not None and cropped is not None:
            name = pipeline if stored == "original" else f"{pipeline}, {stored}"
            parts = (bare, max(0.0, cropped - bare), max(0.0, whole - cropped))
            found[name] = dict(zip(STAGES, parts, strict=True))
    return found


def _decoder(one: Record) -> str | None:
    """Return what decoded a record's images, if it was a decoder of the CPU."""
    backend = BACKENDS.get(one.pipeline)  # type: ignore[call-overload]
    on_gpu = one.config.get("device") == "cuda"
    return None if backend is None or (on_gpu and backend.decodes_on_gpu) else backend.decoder


def plain_name(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _bars(records: Sequence[Record]) -> Figure:
    """Draw a bar for each record, under the form in which images are stored, with the ceilings."""
    rows: list[tuple[str, Record | None]] = []
    ceilings: list[tuple[str, float, list[int]]] = []
    groups = grouped(records, lambda one: str(one.facts.get("stored", "")))
    for stored, of in groups.items():
        limits = grouped((one for one in of if one.share_of_ceiling), _ceiling)
        heads = len(rows)
        rows += [(stored, None)] * bool(limits or len(groups) > 1)
        rows += [("", None)] * (len(limits) - 1)
        place = {one.name: len(rows) + i for i, one in enumerate(of)}
        rows += [(one.name.removesuffix(f", {stored}"), one) for one in of]
        for head, ((name, speed), limited) in enumerate(limits.items(), heads):
            ceilings.append((name, speed, [head, *(place[one.name] for one in limited)]))

    figure, axes = drawing.canvas(title_of(records[0].case), records[0], len(rows))
    edge = max([0.0, *(1.1 * speed for _, speed, _ in ceilings)])
    for y, (_, one) in enumerate(rows):
        if one:
            hatch = "////" if one.unsteady else None
            speed, high = one.images_per_second, drawing.speeds(one)[1]
            axes.barh(
                y, speed, 0.72, color=drawing.colour_of(one), hatch=hatch, edgecolor="white", lw=0
            )
            axes.errorbar(speed, y, xerr=drawing.whisker(one), color=INK, linewidth=0.8, capsize=2)
            label = _label(one)
            note(axes, high, y, label)
            edge = max(edge, high / (1 - (len(label) + 2) / 70))
    for name, speed, places in ceilings:
        for y in places:
            axes.vlines(speed, y - 0.5, y + 0.5, colors=INK, linestyles="--", lw=1)
        right = speed > 0.7 * edge
        axes.annotate(
            shown(f"{name} {drawing.short(speed)}"),
            (speed, places[0]),
            xytext=(-4 if right else 4, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=7,
            color=INK,
        )
    axes.set_xlim(0, edge)
    axes.set_yticks(range(len(rows)), [drawing.tick(name) for name, _ in rows])
    for text, (_, one) in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("normal" if one else "bold")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(_legend(records))
    return figure


def _stacks(
    title: str, parts: Mapping[str, Mapping[str, float]], unit: str, first: Record
) -> Figure:
    """Draw bars that are made of parts."""
    figure, axes = drawing.canvas(title, first, len(parts) + 1)
    for y, of in enumerate(parts.values()):
        left = 0.0
        for (part, size), colour in zip(of.items(), _PART_COLOURS, strict=True):
            axes.barh(y, size, 0.72, left, color=colour, label=part if y == 0 else None)
            left += size
        sizes = " + ".join(f"{size:.2f}" for size in of.values())
        note(axes, left, y, f"{sizes} = {left:.2f}")
    axes.set_xlim(0, 1.5 * max(sum(of.values()) for of in parts.values()))
    axes.set_yticks(range(len(parts)), [drawing.tick(name) for name in parts])
    axes.set_ylim(len(parts) - 0.4, -1.2)
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=7, borderaxespad=0)
    axes.set_xlabel(unit)
    return figure


def _startup(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Return what the seconds from the start of a process to the end of an epoch are made of."""
    found = {}
    for one in records:
        imported = one.facts.get("imports", 0.0)
        first = one.facts.get("first_batch", imported)
        found[one.name] = {
            "importing": imported,
            "to the first batch": max(0.0, first - imported),
            "the rest of the epoch": max(0.0, statistics.median(one.all_seconds) - first),
        }
    return found


def _sweep(over: str, records: Sequence[Record]) -> Figure:
    """Draw speeds over what is varied, and what speeds in proportion to it would be."""
    figure, axes = drawing.canvas(f"Images/s over {over}", records[0], 9)
    scales = over in {"workers", "ranks"}
    names: dict[str, Record] = {}
    measured, ideals = 0.0, 0.0
    for name, of in grouped(records, _line).items():
        of = sorted(of, key=_value)
        first, last = of[0], of[-1]
        _points(axes, of)
        measured = max(measured, *(drawing.speeds(one)[1] for one in of))
        if scales:
            ideal = [first.images_per_second * _value(one) / _value(first) for one in of]
            colour, values = drawing.colour_of(first), [_value(one) for one in of]
            axes.plot(values, ideal, color=colour, linewidth=1, linestyle="--", alpha=0.7)
            ideals = max(ideals, *ideal)
        gain = drawing.times(last.images_per_second / first.images_per_second)
        label = f"{name} {drawing.short(last.images_per_second)}"
        names[label + (f" ({gain})" if scales and len(of) > 1 else "")] = last
    top = 1.08 * min(max(measured, ideals), 1.6 * measured)
    axes.set_ylim(0, top)
    _name_lines(axes, names, gap=0.06 * top)
    _mark_values(axes, sorted({_value(one) for one in records}), doubling=over == "batch")
    notes = "; dashed: in proportion to the first point" if scales else ""
    hollow = "; hollow: unsteady" if any(one.unsteady for one in records) else ""
    axes.set_xlabel(shown(f"{over}{notes}{hollow}"))
    axes.set_ylabel("images/s", fontsize=7, color=QUIET)
    axes.grid(axis="y", alpha=0.3)
    return figure


def _value(one: Record) -> float:
    """Return where a record stands in a sweep."""
    return float(one.facts["value"])


def _points(axes: Axes, line: Sequence[Record]) -> None:
    """Draw the speeds of one line of a sweep."""
    colour = drawing.colour_of(line[0])
    speeds = [one.images_per_second for one in line]
    axes.plot([_value(one) for one in line], speeds, color=colour, linewidth=1.6)
    for one in line:
        axes.errorbar(
            _value(one),
            one.images_per_second,
            yerr=drawing.whisker(one),
            color=colour,
            marker="o",
            markersize=4,
            markerfacecolor="white" if one.unsteady else colour,
            elinewidth=0.8,
            capsize=2,
        )


def _name_lines(axes: Axes, names: Mapping[str, Record], *, gap: float) -> None:
    """Write beside the last point of each line what it is, the texts a gap apart."""
    levels = apart([one.images_per_second for one in names.values()], gap)
    right = max(map(_value, names.values()))
    for (label, one), y in zip(names.items(), levels, strict=True):
        axes.annotate(
            shown(label),
            (right, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=drawing.colour_of(one, paler=False),
            annotation_clip=False,
        )


def _mark_values(axes: Axes, values: Sequence[float], *, doubling: bool) -> None:
    """Write the values below the axis, as far as there is room for them."""
    if doubling:
        axes.set_xscale("log", base=2)
    else:  # values that double crowd at the left
        room = 0.04 * (values[-1] - values[0])
        values = [x for x, after in pairwise([*values, math.inf]) if after - x >= room]
    axes.set_xticks(values, [f"{x:g}" for x in values])
    axes.minorticks_off()


def _legend(records: Sequence[Record]) -> str:
    """Say what the bars show and what their labels mean."""
    baselines = dict.fromkeys(one.baseline for one in records if one.baseline)
    ceilings = dict.fromkeys(one.ceiling for one in records if one.ceiling)
    brackets = [f"times {name}" for name in baselines] + [f"share of {name}" for name in ceilings]
    if any("data_wait" in one.facts for one in records):
        brackets.append("share of time waiting for data")
    text = f"images/s ({', '.join(brackets)})" if brackets else "images/s"
    text += "; whiskers: fastest and slowest repeat"
    if any(one.unsteady for one in records):
        text += f"; hatched: unsteady, more than ±{UNSTEADY:.0%}"
    return "\n".join(map(shown, textwrap.wrap(text, 84)))


def _ceiling(one: Record) -> tuple[str, float]:
    """Return the name and the speed of what a record's speed is a share of."""
    assert one.share_of_ceiling
    return one.ceiling, float(f"{one.images_per_second / one.share_of_ceiling:.6g}")


def _line(one: Record) -> str:
    """Name the line of a sweep that a record is a point of."""
    if not one.pipeline:
        return one.name.rpartition(", ")[0] or one.name
    words = [one.pipeline, str(one.facts.get("what", ""))]
    stored = str(one.facts.get("stored", "original"))
    return " ".join(filter(None, words)) + ("" if stored == "original" else f", {stored}")


def _label(one: Record) -> str:
    """Return a record's speed, and in brackets what it is of others'."""
    shares = [] if one.ratio is None else [drawing.times(one.ratio)]
    shares += [] if one.share_of_ceiling is None else [f"{one.share_of_ceiling:.0%}"]
    if "data_wait" in one.facts:
        shares.append(f"waits {one.facts['data_wait']:.0%}")
    speed = drawing.short(one.images_per_second)
    return f"{speed} ({', '.join(shares)})" if shares else speed
