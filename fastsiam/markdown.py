"""Tables in Markdown, and the format of means in them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns, readable as plain text."""
    lines = [[cell(text) for text in line] for line in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = (
        " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(f"| {line} |" for line in padded)


def cell(text: str) -> str:
    """Escape text for a cell of a table: it must be on one line, and a pipe ends a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def format_mean(values: Sequence[float | None], digits: int) -> str:
    """Format the mean ± standard deviation of the values that are not None; "-" without any."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.{digits}f}{spread}"
