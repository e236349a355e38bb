"""HTML for reports: a page that needs no other file, and the tables and figures on it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .25rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.facts { color: #59636e; margin-top: 0 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem }
.charts { display: grid; grid-template-columns: minmax(0, 56.25rem); gap: 1rem }
figure { margin: 0; border: 1px solid #d1d9e0; border-radius: 6px; padding: .75rem }
figcaption { font-weight: 600 }
figcaption small { display: block; font-weight: 400; color: #59636e }
img { width: 100%; height: auto; display: block }
table { border-collapse: collapse; width: 100%; margin-top: 1rem }
td, th { text-align: left; vertical-align: top }
td, th { padding: .2rem .75rem .2rem 0; border-bottom: 1px solid #eaeef2 }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.settings { display: grid; gap: 0 2rem }
.settings { grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
summary { cursor: pointer; color: #59636e; margin-top: 1rem }
"""


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
    """Return a table of plain texts."""
    lines = [_row("th", heads)] if heads else []
    return f"<table>{''.join([*lines, *(_row('td', row) for row in rows)])}</table>"


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary in which nested dictionaries are replaced by their entries."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _row(tag: str, cells: Iterable[Any]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"
