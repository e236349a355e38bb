"""The hand that charts are drawn with: a canvas, colours, texts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastsiam.bench.records import Record
from fastsiam.bench.tables import caption
from fastsiam.pipelines.backends import BACKENDS, BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2328"
QUIET = "#59636e"
_PALETTE = ("#8c8c8c", "#0072b2", "#009e73", "#e69f00", "#56b4e9")
_COLOURS: dict[str, str] = dict(zip(BACKENDS, _PALETTE, strict=False))
"""Of pipelines: Okabe and Ito's palette, which all kinds of eyes can tell apart, and in gray."""
_OTHER = "#cc79a7"
_DPI = 150
_WIDTH = 6.0
"""Inches: 900 pixels, a README's width."""


def canvas(title: str, first: Record, rows: float) -> tuple[Figure, Axes]:
    """Return a figure with a title, what was measured where in small type, and room for rows."""
    from matplotlib.figure import Figure

    small = textwrap.wrap(caption([first]), 128)
    head = 0.38 + 0.12 * len(small)
    height = head + 0.27 * rows + 0.45
    drawn = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    drawn.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
    top = 1 - 0.08 / height
    drawn.text(0.012, top, shown(title), va="top", fontsize=11, fontweight="bold", color=INK)
    drawn.text(
        0.012,
        top - 0.22 / height,
        "\n".join(map(shown, small)),
        va="top",
        fontsize=6,
        color=QUIET,
        linespacing=1.25,
    )
    axes = drawn.add_subplot()
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    axes.xaxis.label.set(fontsize=7, color=QUIET)
    return drawn, axes


def note(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a figure to the right of a bar's end."""
    axes.annotate(
        shown(text),
        (x, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=5,  # above a ceiling that it crosses
    )


def speeds(one: Record) -> tuple[float, float]:
    """Return the speeds of the slowest and of the fastest repeat."""
    return one.images / max(one.all_seconds), one.images / min(one.all_seconds)


def whisker(one: Record) -> list[list[float]]:
    """Return how far the slowest and the fastest repeat are from the median, for an error bar."""
    slowest, fastest = speeds(one)
    return [[one.images_per_second - slowest], [fastest - one.images_per_second]]


def colour_of(one: Record, *, paler: bool = True) -> str:
    """Return a pipeline's colour; crops, which are half of the work, have a lighter one."""
    from matplotlib.colors import to_hex, to_rgb

    name = one.pipeline or one.name.partition(",")[0]
    standard = _COLOURS[BASELINE] if name == one.baseline else _OTHER
    colour = _COLOURS.get(name, standard)
    if paler and one.facts.get("what") == "crops":
        red, green, blue = (0.45 * part + 0.55 for part in to_rgb(colour))
        colour = to_hex((red, green, blue))
    return colour


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Return values moved up as little as keeps them a gap apart."""
    moved = list(values)
    below = float("-inf")
    for i in sorted(range(len(values)), key=lambda i: values[i]):
        below = moved[i] = max(values[i], below + gap)
    return moved


def tick(name: str) -> str:
    """Return a name as it stands beside an axis: in two lines at most."""
    return shown(textwrap.fill(name, 32, max_lines=2, placeholder=" ..."))


def shown(text: str) -> str:
    """Return a text as matplotlib shows it, which takes dollars for mathematics."""
    return text.replace("$", r"\$")


def times(ratio: float) -> str:
    """Write how many times as fast something is."""
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.2g}x"


def short(value: float) -> str:
    """Write a speed."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
