"""What charts of records have of their own: a canvas that says what was measured, colours."""

from __future__ import annotations

import io
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastsiam.bench.records import Record
from fastsiam.bench.tables import caption
from fastsiam.pipelines.backends import BASELINE
from fastsiam.report import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: dict[str, str] = {
    "torchvision": drawing.GRAY,
    "native": drawing.VERMILION,
    "ffcv": drawing.BLUE,
    "dali": drawing.GREEN,
    "memory": drawing.ORANGE,
    "synthetic": drawing.SKY,
}
"""Of pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of a picture on a light or a dark page."""

    ink: str
    """Texts."""
    accent: str
    """The pipeline ``native``."""
    own: str
    """fastsiam's other pipelines."""
    others: str
    """The baseline and other libraries."""

    def bar(self, one: Record) -> str:
        """Return the colour of a record's bar."""
        if one.pipeline in ("", BASELINE):
            return self.others
        return self.accent if one.pipeline == "native" else self.own


THEMES = {
    "light": Theme(ink=drawing.INK, accent=drawing.VERMILION, own=drawing.BLUE, others="#a8b0b8"),
    "dark": Theme(ink="#f0f6fc", accent=drawing.VERMILION, own=drawing.SKY, others="#6e7681"),
}
"""By name."""


def canvas(title: str, first: Record, rows: float) -> tuple[Figure, Axes]:
    """Return a figure with a title, what was measured where in small type, and room for rows."""
    drawn = drawing.canvas(title, caption([first]), 0.27 * rows + 0.45)
    return drawn, drawing.plain(drawn.add_subplot())


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
    standard = _COLOURS[BASELINE] if name == one.baseline else drawing.PINK
    colour = _COLOURS.get(name, standard)
    if paler and one.facts.get("what") == "crops":
        red, green, blue = (0.45 * part + 0.55 for part in to_rgb(colour))
        colour = to_hex((red, green, blue))
    return colour


def svg(figure: Figure) -> bytes:
    """Return a vector picture without a background that is the same whenever it is made."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "fastsiam", "svg.fonttype": "path"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Creator": None, "Date": None}
        )
    return buffer.getvalue()


def tick(name: str) -> str:
    """Return a name as it stands beside an axis: in two lines at most."""
    return drawing.shown(textwrap.fill(name, 32, max_lines=2, placeholder=" ..."))


def times(ratio: float) -> str:
    """Write how many times as fast something is."""
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.2g}x"


def short(value: float) -> str:
    """Write a speed."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
