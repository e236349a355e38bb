"""HTML for reports: a page that needs no other file, and the tables and figures on it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem; margin-bottom: 0 }
.facts { color: #59636e; margin-top: 0 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem }
.charts { display: grid; grid-template-columns: minmax(0, 56.25rem); gap: 1rem }
figure { margin: 0; border: 1px solid #d1d9e0; border-radius: 6px; padding: .75rem }
figcaption { font-weight: 600 }
figcaption small { display: block; font-weight: 400; color: #59636e }
img { width: 100%; height: auto; display: block }
.table { overflow-x: auto; margin-top: 1rem }
table { border-collapse: collapse; min-width: 100% }
td, th { text-align: left; vertical-align: top }
td, th { padding: .2rem .75rem .2rem .25rem; border-bottom: 1px solid #eaeef2 }
th { white-space: nowrap }
td { font-variant-numeric: tabular-nums; overflow-wrap: break-word; min-width: 4.5rem }
td.best { font-weight: 600; background: #dafbe1 }
.settings td { overflow-wrap: anywhere }
.settings { display: grid; gap: 0 2rem }
.settings { grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
summary { cursor: pointer; color: #59636e; margin-top: 1rem }
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table that may be marked."""

    text: str
    best: bool = False


def whole(title: str, facts: str, body: str) -> str:
    """Return a whole page; it needs no style, script or image of another file.

    Args:
        title: plain text.
        facts: plain text, one line below the title.
        body: HTML.
    """
    title = html.escape(title)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><body><h1>{title}</h1>"
        f'<p class="facts">{html.escape(facts)}</p>{body}</body></html>\n'
    )


def heading(text: str, facts: str) -> str:
    """Return the heading of a section and one line below it, of plain texts."""
    return f'<h2>{html.escape(text)}</h2><p class="facts">{html.escape(facts)}</p>'


def subheading(text: str, facts: str = "") -> str:
    """Return the heading of a part of a section and perhaps a line below it, of plain texts."""
    below = f'<p class="facts">{html.escape(facts)}</p>' if facts else ""
    return f"<h3>{html.escape(text)}</h3>{below}"


def listing(lines: Iterable[str]) -> str:
    """Return a list of plain texts."""
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def figure(image: bytes, kind: str, alt: str, caption: str = "", note: str = "") -> str:
    """Return an image that lies within the page.

    Args:
        image: the image's file.
        kind: its MIME type.
        alt: plain text in its place.
        caption: plain text above it.
        note: plain text in small type below the caption.
    """
    head = f"{html.escape(caption)}<small>{html.escape(note)}</small>" if caption else ""
    return (
        f"<figure>{f'<figcaption>{head}</figcaption>' if head else ''}"
        f'<img alt="{html.escape(alt)}" src="data:{kind};base64,'
        f'{base64.b64encode(image).decode()}"></figure>'
    )


def table(rows: Iterable[Sequence[Any]], heads: Sequence[str] = ()) -> str:
    """Return a table of plain texts and ``Cell``s; what is too wide for a screen scrolls."""
    lines = [_row("th", heads)] if heads else []
    lines += [_row("td", row) for row in rows]
    return f'<div class="table"><table>{"".join(lines)}</table></div>'


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary in which nested dictionaries are replaced by their entries."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _row(tag: str, cells: Iterable[Any]) -> str:
    return f"<tr>{''.join(_cell(tag, cell) for cell in cells)}</tr>"


def _cell(tag: str, cell: Any) -> str:
    mark, text = (cell.best, cell.text) if isinstance(cell, Cell) else (False, cell)
    start = f'{tag} class="best"' if mark else tag
    return f"<{start}>{html.escape(str(text))}</{tag}>"
