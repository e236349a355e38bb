"""How a setting is refused, and what was perhaps meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def nearest(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return "did you mean a or b?" for a misspelt name, or nothing if none resembles it.

    Args:
        name: as it was given.
        known: names that there are; one that occurs twice counts once.
        most: how many to suggest.
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=most)
    return f"did you mean {' or '.join(close)}?" if close else ""


def or_nearest(refusal: str, name: str, known: Iterable[str]) -> str:
    """Return a refusal of a name, with the nearest one that there is."""
    return "; ".join(filter(None, [refusal, nearest(name, known)]))
