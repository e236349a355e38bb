"""HTML pages for reports: sections with charts and tables, rendered by a template."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsiam.files import as_utf8


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain text, with an optional title."""

    rows: Sequence[Sequence[Any]]
    heads: Sequence[str] = ()
    title: str = ""
    facts: str = ""
    """Line below the title."""

    @classmethod
    def of(cls, values: Iterable[tuple[str, Any]], title: str = "") -> Table:
        """Create a table with a row for each name and value."""
        return cls([(name, text_of(value)) for name, value in values], title=title)


@dataclass(frozen=True, slots=True)
class Figure:
    """An image that is embedded in the page."""

    image: bytes
    kind: str
    """MIME type."""
    alt: str
    caption: str = ""
    note: str = ""
    """Small text below the caption."""

    @property
    def source(self) -> str:
        """The image as a data URL."""
        return f"data:{self.kind};base64,{base64.b64encode(self.image).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page; empty fields are left out."""

    title: str = ""
    facts: str = ""
    """Line below the title."""
    lines: Sequence[str] = ()
    """Items of a bulleted list."""
    figures: Sequence[Figure] = ()
    columns: bool = True
    """Whether figures are placed side by side if the screen is wide enough."""
    tables: Sequence[Table] = ()
    settings: Sequence[Table] = ()
    """Narrow tables that are placed side by side."""
    details: Sequence[Table] = ()
    """Tables that are collapsed until the reader opens them."""
    note: str = ""
    """Paragraph at the end."""


def render(title: str, facts: str, sections: Sequence[Section]) -> str:
    """Render a page as one self-contained HTML file.

    Args:
        title: plain text, like all text of a page.
        facts: line below the title.
        sections: sections of the page; empty ones are left out.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # PyTorch depends on it

    loader = PackageLoader("fastsiam.report", "")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    page = environment.get_template("page.html.jinja")
    return as_utf8(page.render(title=title, facts=facts, sections=sections))


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a dictionary by one level: replace nested dictionaries by their entries."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        entries |= value if isinstance(value, dict) else {name: value}
    return entries


def text_of(value: Any) -> str:
    """Format a setting's value for display."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(text_of, value)) or "none"
        case "" | None:
            return "none"
    return str(value)
