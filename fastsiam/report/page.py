"""Pages of reports: sections of charts and tables, laid out by a template."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsiam.files import as_utf8


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain texts below a heading."""

    rows: Sequence[Sequence[Any]]
    heads: Sequence[str] = ()
    title: str = ""
    facts: str = ""
    """A line below the title."""

    @classmethod
    def of(cls, values: Iterable[tuple[str, Any]], title: str = "") -> Table:
        """Return a table of names and values."""
        return cls([(name, text_of(value)) for name, value in values], title=title)


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture that is embedded in the page."""

    image: bytes
    kind: str
    """MIME type."""
    alt: str
    caption: str = ""
    note: str = ""
    """Small text below the caption."""

    @property
    def source(self) -> str:
        """The picture as a URL."""
        return f"data:{self.kind};base64,{base64.b64encode(self.image).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page; what is empty is left out."""

    title: str = ""
    facts: str = ""
    """A line below the title."""
    lines: Sequence[str] = ()
    """Items of a list."""
    figures: Sequence[Figure] = ()
    columns: bool = True
    """Whether figures stand beside each other where the screen is wide enough."""
    tables: Sequence[Table] = ()
    settings: Sequence[Table] = ()
    """Narrow tables that stand beside each other."""
    details: Sequence[Table] = ()
    """Tables that the reader unfolds."""
    note: str = ""
    """A paragraph at the end."""


def render(title: str, facts: str, sections: Sequence[Section]) -> str:
    """Return a page as HTML that needs no other file.

    Args:
        title: plain text, as all texts of a page.
        facts: a line below the title.
        sections: parts of the page; empty ones are left out.
    """
    from jinja2 import Environment, PackageLoader  # PyTorch depends on it

    loader = PackageLoader("fastsiam.report", "")
    environment = Environment(loader=loader, autoescape=True, keep_trailing_newline=True)
    page = environment.get_template("page.html.jinja")
    return as_utf8(page.render(title=title, facts=facts, sections=sections))


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dictionary in which nested dictionaries are replaced by their entries."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        entries |= value if isinstance(value, dict) else {name: value}
    return entries


def text_of(value: Any) -> str:
    """Write a setting's value for people."""
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
