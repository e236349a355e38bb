"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that people can read as it is."""
    lines = [[_cell(text) for text in line] for line in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {line} |" for line in padded)


def _cell(text: str) -> str:
    """Return a text as a cell of a Markdown table: in one line, its bars not those of the table."""
    return text.replace("|", "\\|").replace("\n", " ")
