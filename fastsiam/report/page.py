"""HTML pages for reports: sections with charts and tables, rendered by a template."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsiam.console import text_of
from fastsiam.files import as_utf8


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain text."""

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
    """A section of a page, which is left out if it has no figures and no rows."""

    title: str = ""
    facts: str = ""
    """Line below the title."""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    """Tables; those without rows are left out."""
    columns: bool = False
    """Whether figures and tables are placed side by side if the screen is wide enough."""
    details: Sequence[Table] = ()
    """Tables that are collapsed until the reader opens them."""


def render(title: str, facts: str, sections: Sequence[Section]) -> str:
    """Render a page as one self-contained HTML file.

    Args:
        title: plain text, like all text of a page.
        facts: line below the title.
        sections: sections of the page; empty ones are left out.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

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
