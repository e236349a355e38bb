"""The charts of what was measured."""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from fastsiam.bench.measure import UNSTEADY
from fastsiam.bench.records import Record, caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Thing = TypeVar("Thing")

TITLES = {
    "machine": "The machine",
    "loader": "Loading: from files to batches",
    "decode": "Bare decoding",
    "photometric": "The photometric stage",
    "step": "A training step",
    "train": "Training",
    "convert": "Converting",
    "startup": "From the start to the first batch",
    "peers": "Beside other libraries",
}
"""What the cases are called on the page and in charts; others go by their own name."""
STAGES = ("decode", "crop", "photometric")
"""What an image goes through on its way into a batch."""

_COLOURS = {
    "torchvision": "#8c8c8c",
    "ffcv": "#0072b2",
    "dali": "#009e73",
    "memory": "#e69f00",
    "synthetic": "#56b4e9",
}
"""Okabe and Ito's palette: it can be told apart by all kinds of eyes, and in gray."""
_OTHER = "#cc79a7"
_INK = "#1f2328"
_QUIET = "#59636e"
_PART_COLOURS = ("#2b3a67", "#8fa3c8", "#f0c75e")
_DPI = 150
_WIDTH = 6.0
"""Inches: 900 pixels, a README's width."""
_DECODER = {"torchvision": "PIL", "ffcv": "libjpeg-turbo", "dali": "libjpeg-turbo"}


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
        return {case: _stacks(TITLES[case], _startup(records), "seconds", records[0])}
    shown = [one for one in records if one.images]
    if case == "peers":
        shown.sort(key=lambda one: -one.images_per_second)
    found = {plain_name(case): _bars(shown)} if shown else {}
    if case == "loader" and (parts := stages(run)):
        unit = "milliseconds of processor time for an image, both views"
        found["stages"] = _stacks("Where the processor time goes", parts, unit, records[0])
    return found


def stages(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """Take the processor time of loading apart.

    Args:
        records: of one run; those of the cases "loader" and "decode" count.

    Returns:
        Milliseconds of an image by stage (``STAGES``), for each pipeline and, where it is not the
        original images, the form in which they are stored. Only those of which all parts were
        measured; DALI on a GPU, which does not decode with what was measured, is none of them.
    """
    decode, crops, views = {}, {}, {}
    for one in records:
        milliseconds = 1000 * one.cpu_seconds_per_image
        stored = one.facts.get("stored", "original")
        if one.case == "decode":
            decode[one.name.partition(",")[0], stored] = milliseconds
        elif one.case == "loader" and one.facts.get("what") == "crops":
            crops[one.pipeline, stored] = milliseconds
        elif one.case == "loader" and one.facts.get("what") == "views":
            on_gpu = one.pipeline == "dali" and one.config.get("device") == "cuda"
            if one.pipeline in _DECODER and not on_gpu:
                views[one.pipeline, stored] = milliseconds
    found = {}
    for (pipeline, stored), whole in views.items():
        bare, cropped = decode.get((_DECODER[pipeline], stored)), crops.get((pipeline, stored))
        if bare is not None and cropped is not None:
            name = pipeline if stored == "original" else f"{pipeline}, {stored}"
            parts = (bare, max(0.0, cropped - bare), max(0.0, whole - cropped))
            found[name] = dict(zip(STAGES, parts, strict=True))
    return found


def grouped(things: Iterable[Record], key: Callable[[Record], Thing]) -> dict[Thing, list[Record]]:
    """Return the records by what they have in common, in the order in which that first appears."""
    groups: dict[Thing, list[Record]] = {}
    for one in things:
        groups.setdefault(key(one), []).append(one)
    return groups


def plain_name(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def png(figure: Figure) -> bytes:
    """Return a picture that is the same whenever it is made."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


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

    figure, axes = _canvas(TITLES.get(records[0].case, records[0].case), records[0], len(rows))
    edge = max([0.0, *(1.1 * speed for _, speed, _ in ceilings)])
    for y, (_, one) in enumerate(rows):
        if one:
            hatch = "////" if one.unsteady else None
            speed, high = one.images_per_second, _range(one)[1]
            axes.barh(y, speed, 0.72, color=_colour(one), hatch=hatch, edgecolor="white", lw=0)
            axes.errorbar(speed, y, xerr=_whisker(one), color=_INK, linewidth=0.8, capsize=2)
            label = _label(one)
            _note(axes, high, y, label)
            edge = max(edge, high / (1 - (len(label) + 2) / 70))
    for name, speed, places in ceilings:
        for y in places:
            axes.vlines(speed, y - 0.5, y + 0.5, colors=_INK, linestyles="--", lw=1)
        right = speed > 0.7 * edge
        axes.annotate(
            _shown(f"{name} {_number(speed)}"),
            (speed, places[0]),
            xytext=(-4 if right else 4, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=7,
            color=_INK,
        )
    axes.set_xlim(0, edge)
    axes.set_yticks(range(len(rows)), [_tick(name) for name, _ in rows])
    for tick, (_, one) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if one else "bold")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(_legend(records))
    return figure


def _stacks(
    title: str, parts: Mapping[str, Mapping[str, float]], unit: str, first: Record
) -> Figure:
    """Draw bars that are made of parts."""
    figure, axes = _canvas(title, first, len(parts) + 1)
    for y, of in enumerate(parts.values()):
        left = 0.0
        for (part, size), colour in zip(of.items(), _PART_COLOURS, strict=True):
            axes.barh(y, size, 0.72, left, color=colour, label=part if y == 0 else None)
            left += size
        sizes = " + ".join(f"{size:.2f}" for size in of.values())
        _note(axes, left, y, f"{sizes} = {left:.2f}")
    axes.set_xlim(0, 1.5 * max(sum(of.values()) for of in parts.values()))
    axes.set_yticks(range(len(parts)), [_tick(name) for name in parts])
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
    figure, axes = _canvas(f"Images/s over {over}", records[0], 9)
    scales = over in {"workers", "ranks"}
    ends: dict[str, tuple[float, float, str]] = {}
    measured, ideals = 0.0, 0.0
    for name, of in grouped(records, _line).items():
        of = sorted(of, key=lambda one: float(one.facts["value"]))
        values = [float(one.facts["value"]) for one in of]
        speeds = [one.images_per_second for one in of]
        colour = _colour(of[0])
        axes.plot(values, speeds, color=colour, linewidth=1.6)
        for one, x in zip(of, values, strict=True):
            axes.errorbar(
                x,
                one.images_per_second,
                yerr=_whisker(one),
                color=colour,
                marker="o",
                markersize=4,
                markerfacecolor="white" if one.unsteady else colour,
                elinewidth=0.8,
                capsize=2,
            )
            measured = max(measured, _range(one)[1])
        if scales:
            ideal = [speeds[0] * x / values[0] for x in values]
            axes.plot(values, ideal, color=colour, linewidth=1, linestyle="--", alpha=0.7)
            ideals = max(ideals, *ideal)
        gain = f" ({_times(speeds[-1] / speeds[0])})" if scales and len(of) > 1 else ""
        deep = _colour(of[0], paler=False)
        ends[f"{name} {_number(speeds[-1])}{gain}"] = (values[-1], speeds[-1], deep)
    top = 1.08 * min(max(measured, ideals), 1.6 * measured)
    axes.set_ylim(0, top)
    levels = _apart([y for _, y, _ in ends.values()], 0.06 * top)
    right = max(x for x, _, _ in ends.values())
    for (label, (_, _, colour)), y in zip(ends.items(), levels, strict=True):
        axes.annotate(
            _shown(label),
            (right, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=colour,
            annotation_clip=False,
        )
    ticks = sorted({float(one.facts["value"]) for one in records})
    if over == "batch":
        axes.set_xscale("log", base=2)
    else:  # values that double crowd at the left
        room = 0.04 * (ticks[-1] - ticks[0])
        ticks = [x for x, after in pairwise([*ticks, math.inf]) if after - x >= room]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    notes = "; dashed: in proportion to the first point" if scales else ""
    hollow = "; hollow: unsteady" if any(one.unsteady for one in records) else ""
    axes.set_xlabel(_shown(f"{over}{notes}{hollow}"))
    axes.set_ylabel("images/s", fontsize=7, color=_QUIET)
    axes.grid(axis="y", alpha=0.3)
    return figure


def _canvas(title: str, first: Record, rows: float) -> tuple[Figure, Axes]:
    """Return a figure with a title, what was measured where in small type, and room for rows."""
    from matplotlib.figure import Figure

    small = textwrap.wrap(caption([first]), 128)
    head = 0.38 + 0.12 * len(small)
    height = head + 0.27 * rows + 0.45
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
    top = 1 - 0.08 / height
    figure.text(0.012, top, _shown(title), va="top", fontsize=11, fontweight="bold", color=_INK)
    figure.text(
        0.012,
        top - 0.22 / height,
        "\n".join(map(_shown, small)),
        va="top",
        fontsize=6,
        color=_QUIET,
        linespacing=1.25,
    )
    axes = figure.add_subplot()
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5, length=0, colors=_INK)
    axes.xaxis.label.set(fontsize=7, color=_QUIET)
    return figure, axes


def _note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        _shown(text),
        (x, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=5,  # above a ceiling that it crosses
    )


def _range(one: Record) -> tuple[float, float]:
    """Return the speeds of the slowest and of the fastest repeat."""
    return one.images / max(one.all_seconds), one.images / min(one.all_seconds)


def _whisker(one: Record) -> list[list[float]]:
    low, high = _range(one)
    return [[one.images_per_second - low], [high - one.images_per_second]]


def _label(one: Record) -> str:
    """Return a record's speed, and in brackets what it is of others'."""
    shares = [] if one.ratio is None else [_times(one.ratio)]
    shares += [] if one.share_of_ceiling is None else [f"{one.share_of_ceiling:.0%}"]
    if "data_wait" in one.facts:
        shares.append(f"waits {one.facts['data_wait']:.0%}")
    speed = _number(one.images_per_second)
    return f"{speed} ({', '.join(shares)})" if shares else speed


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
    return "\n".join(map(_shown, textwrap.wrap(text, 84)))


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


def _colour(one: Record, *, paler: bool = True) -> str:
    """Return a pipeline's colour; crops, which are half of the work, have a lighter one."""
    from matplotlib.colors import to_hex, to_rgb

    name = one.pipeline or one.name.partition(",")[0]
    standard = _COLOURS["torchvision"] if name == one.baseline else _OTHER
    colour = _COLOURS.get(name, standard)
    if paler and one.facts.get("what") == "crops":
        red, green, blue = (0.45 * part + 0.55 for part in to_rgb(colour))
        colour = to_hex((red, green, blue))
    return colour


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Return values moved up as little as keeps them a gap apart."""
    moved = list(values)
    below = float("-inf")
    for i in sorted(range(len(values)), key=lambda i: values[i]):
        below = moved[i] = max(values[i], below + gap)
    return moved


def _tick(name: str) -> str:
    return _shown(textwrap.fill(name, 32, max_lines=2, placeholder=" ..."))


def _shown(text: str) -> str:
    """Return a text as matplotlib shows it, which takes dollars for mathematics."""
    return text.replace("$", r"\$")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.2g}x"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
