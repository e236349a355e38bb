"""The hand that charts are drawn with: a canvas, colours, texts, and a file's bytes."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from fastsiam.files import as_utf8

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2328"
QUIET = "#59636e"
GRAY, BLUE, GREEN, ORANGE = "#8c8c8c", "#0072b2", "#009e73", "#e69f00"
SKY, PINK, VERMILION = "#56b4e9", "#cc79a7", "#d55e00"
"""Okabe and Ito's palette, which all kinds of eyes can tell apart, and a gray."""
_DPI = 150
_WIDTH = 6.0
"""Inches: 900 pixels, a README's width."""


def canvas(title: str, small: str, height: float) -> Figure:
    """Return a figure with a title, a text in small type below it, and room for charts.

    Args:
        title: a line.
        small: says what was measured where; it is broken into lines.
        height: of the room for charts, in inches.
    """
    from matplotlib.figure import Figure

    lines = textwrap.wrap(small, 128)
    head = 0.38 + 0.12 * len(lines)
    height += head
    drawn = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    drawn.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
    top = 1 - 0.08 / height
    drawn.text(0.012, top, shown(title), va="top", fontsize=11, fontweight="bold", color=INK)
    drawn.text(
        0.012,
        top - 0.22 / height,
        "\n".join(map(shown, lines)),
        va="top",
        fontsize=6,
        color=QUIET,
        linespacing=1.25,
    )
    return drawn


def plain(axes: Axes) -> Axes:
    """Return axes without what a chart does not need: lines at the top and right, long ticks."""
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    axes.xaxis.label.set(fontsize=7, color=QUIET)
    return axes


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
        zorder=5,  # above a line that it crosses
    )


def shown(text: str) -> str:
    """Return a text as matplotlib shows it, which takes dollars for mathematics."""
    return as_utf8(text).replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """Return a picture that is the same whenever it is made."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
