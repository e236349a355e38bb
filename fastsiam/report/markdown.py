"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns, readable as plain text."""
    lines = [[_cell(text) for text in line] for line in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {line} |" for line in padded)


def _cell(text: str) -> str:
    """Format text as a cell of a Markdown table: on one line, with bars escaped."""
    return text.replace("|", "\\|").replace("\n", " ")
