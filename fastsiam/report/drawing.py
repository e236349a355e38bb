"""Shared style of charts: layout, colours, text and PNG output."""

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
"""Okabe and Ito's colour-blind-safe palette, and a gray."""


def canvas(title: str, small: str, height: float) -> Figure:
    """Create a figure with a title, small text below it, and space for charts.

    Args:
        title: one line.
        small: what was measured and where; long text is wrapped.
        height: height of the space for charts, in inches.
    """
    from matplotlib.figure import Figure

    lines = textwrap.wrap(small, 128)
    head = 0.38 + 0.12 * len(lines)
    height += head
    # 900 pixels, the width of a README
    figure = Figure(figsize=(6, height), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - head / height))
    top = 1 - 0.08 / height
    figure.text(0.012, top, escape(title), va="top", fontsize=11, fontweight="bold", color=INK)
    figure.text(
        0.012,
        top - 0.22 / height,
        "\n".join(map(escape, lines)),
        va="top",
        fontsize=6,
        color=QUIET,
        linespacing=1.25,
    )
    return figure


def plain(axes: Axes) -> Axes:
    """Simplify axes and return them: no tick marks, and no lines at the top and right."""
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5, length=0, colors=INK)
    axes.xaxis.label.set(fontsize=7, color=QUIET)
    return axes


def note(axes: Axes, x: float, y: float, text: str, *, gap: int = 5, va: str = "center") -> None:
    """Write text to the right of a point, such as the end of a bar, ``gap`` points away."""
    axes.annotate(
        escape(text),
        (x, y),
        xytext=(gap, 0),
        textcoords="offset points",
        va=va,
        fontsize=7,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=5,  # above any line that crosses it
    )


def escape(text: str) -> str:
    """Escape text for matplotlib, which parses text between dollar signs as mathematics."""
    return as_utf8(text).replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """Render a figure as a reproducible PNG, without matplotlib's version in its metadata."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
