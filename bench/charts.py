"""Charts of benchmark records."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastsiam.bench.cases import title_of
from fastsiam.bench.measurements import UNSTEADY, Record
from fastsiam.bench.tables import caption, number
from fastsiam.pipelines.backends import BASELINE
from fastsiam.report import drawing
from fastsiam.report.drawing import INK, escape, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: dict[str, str] = {
    "torchvision": drawing.GRAY,
    "native": drawing.VERMILION,
    "ffcv": drawing.BLUE,
    "dali": drawing.GREEN,
    "memory": drawing.ORANGE,
    "synthetic": drawing.SKY,
}
"""Bar colour of each pipeline."""
_THEMES = {
    "light": (INK, drawing.BLUE, "#a8b0b8"),
    "dark": ("#f0f6fc", drawing.SKY, "#6e7681"),
}
"""Colours by page theme: text, fastsiam's pipelines except ``native`` and the baseline, and all
other libraries with the baseline."""


def chart(records: Sequence[Record]) -> Figure | None:
    """Draw a bar chart of one case's records, with their ceilings; None if no record has images."""
    records = [one for one in records if one.images]
    if not records:
        return None
    if records[0].case == "peers":
        records = sorted(records, key=lambda one: -one.images_per_second)
    title = title_of(records[0].case)
    figure = drawing.canvas(title, caption(records), 0.27 * len(records) + 0.45)
    axes = drawing.plain(figure.add_subplot())
    edge = 0.0
    for y, one in enumerate(records):
        hatch, speed = "////" if one.unsteady else None, one.images_per_second
        axes.barh(y, speed, 0.72, color=_colour(one), hatch=hatch, edgecolor="white", lw=0)
        low, high = one.images / max(one.all_seconds), one.images / min(one.all_seconds)
        whisker = [[speed - low], [high - speed]]
        axes.errorbar(speed, y, xerr=whisker, color=INK, linewidth=0.8, capsize=2)
        label = _label(one)
        note(axes, high, y, label)
        edge = max(edge, high / (1 - (len(label) + 2) / 70))
        if one.share_of_ceiling:
            ceiling = speed / one.share_of_ceiling
            axes.vlines(ceiling, y - 0.5, y + 0.5, colors=INK, linestyles="--", lw=1)
            edge = max(edge, 1.1 * ceiling)
    axes.set_xlim(0, edge)
    axes.set_yticks(range(len(records)), [_tick(one.name) for one in records])
    axes.set_ylim(len(records) - 0.4, -0.6)
    axes.set_xlabel(_legend(records))
    return figure


def front_charts(records: Sequence[Record]) -> dict[str, bytes]:
    """Draw minimal bar charts of the libraries' speeds, for the top of a README.

    Returns:
        A chart for light pages, "peers-light.svg", and one for dark pages, "peers-dark.svg".
    """
    from matplotlib.figure import Figure

    records = sorted(records, key=lambda one: -one.images_per_second)
    charts = {}
    for name, (ink, bar_colour, quiet_colour) in _THEMES.items():
        figure = Figure(figsize=(7.2, 0.26 * len(records) + 0.1), layout="constrained")
        axes = figure.add_subplot()
        pipelines = {"": quiet_colour, BASELINE: quiet_colour, "native": drawing.VERMILION}
        bars = axes.barh(
            [_tick(one.name) for one in records],
            [one.images_per_second for one in records],
            0.68,
            color=[pipelines.get(one.pipeline, bar_colour) for one in records],
        )
        unsteady = (f" (±{one.spread:.0%})" if one.unsteady else "" for one in records)
        texts = [number(x.images_per_second) + u for x, u in zip(records, unsteady, strict=True)]
        axes.bar_label(bars, texts, padding=5, fontsize=8.5, color=ink)
        axes.tick_params(length=0, labelsize=8.5, colors=ink)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, 1.12 * records[0].images_per_second)
        axes.set_ylim(len(records) - 0.5, -0.5)
        charts[f"peers-{name}.svg"] = _svg(figure)
    return charts


def _svg(figure: Figure) -> bytes:
    """Render a figure as a reproducible SVG with a transparent background."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "fastsiam", "svg.fonttype": "path"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Creator": None, "Date": None}
        )
    return buffer.getvalue()


def plain_name(text: str) -> str:
    """Replace characters that do not belong in a file name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _label(one: Record) -> str:
    """Format a record's speed, with its ratio, share of the ceiling and data wait in brackets."""
    shares = []
    if one.ratio is not None:
        shares.append(f"{number(one.ratio)}x")
    if one.share_of_ceiling is not None:
        shares.append(f"{one.share_of_ceiling:.0%}")
    if "data_wait" in one.facts:
        shares.append(f"waits {one.facts['data_wait']:.0%}")
    speed = number(one.images_per_second)
    return f"{speed} ({', '.join(shares)})" if shares else speed


def _legend(records: Sequence[Record]) -> str:
    """Return the axis label, which explains the bars and their labels."""
    baselines = dict.fromkeys(one.baseline for one in records if one.baseline)
    ceilings = dict.fromkeys(one.ceiling for one in records if one.ceiling)
    brackets = [f"times {name}" for name in baselines] + [f"share of {name}" for name in ceilings]
    if any("data_wait" in one.facts for one in records):
        brackets.append("share of time waiting for data")
    text = f"images/s ({', '.join(brackets)})" if brackets else "images/s"
    text += "; whiskers: fastest and slowest repeat"
    text += f"; dashed: {', '.join(ceilings)}" if ceilings else ""
    if any(one.unsteady for one in records):
        text += f"; hatched: unsteady, more than ±{UNSTEADY:.0%}"
    return "\n".join(map(escape, textwrap.wrap(text, 84)))


def _colour(one: Record) -> str:
    """Return a record's bar colour; a lighter one for crops, which are only part of the work."""
    from matplotlib.colors import to_hex, to_rgb

    name = one.pipeline or one.name.partition(",")[0]
    colour = COLOURS.get(name, COLOURS[BASELINE] if name == one.baseline else drawing.PINK)
    if one.facts.get("what") == "crops":
        red, green, blue = (0.45 * part + 0.55 for part in to_rgb(colour))
        colour = to_hex((red, green, blue))
    return colour


def _tick(name: str) -> str:
    """Wrap a name for an axis label, to two lines at most."""
    return escape(textwrap.fill(name, 32, max_lines=2, placeholder=" ..."))
