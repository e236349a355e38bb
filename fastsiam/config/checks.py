"""The ways to refuse a setting, and what was perhaps meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def share(text: str, name: str) -> float:
    """Return the percent of a share such as "10%"; 0.0 for an empty text, "0" and "0%".

    Args:
        text: the setting.
        name: of the setting, for the message.

    Raises:
        ValueError: it is neither 0 nor a share above 0% and below 100%.
    """
    if text in ("", "0", "0%"):
        return 0.0
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    good = text.endswith("%") and 0 < percent < 100
    require(
        good,
        f"{name} is a share above 0% and below 100%, such as 10%, or 0 for none, not {text!r}",
    )
    return percent


def nearest(name: str, known: Iterable[str], *, most: int = 1, alike: float = 0.6) -> str:
    """Return "did you mean a or b?" for a misspelt name, or nothing if none resembles it.

    Args:
        name: as it was given.
        known: names that there are; one that occurs twice counts once.
        most: how many to suggest.
        alike: how much they have to resemble it, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=most, cutoff=alike)
    return f"did you mean {' or '.join(close)}?" if close else ""


def or_nearest(refusal: str, name: str, known: Iterable[str]) -> str:
    """Return a refusal of a name, with the nearest one that there is."""
    return "; ".join(filter(None, [refusal, nearest(name, known)]))


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise ``ValueError`` unless there is a recipe, a method, ... of that name."""
    there_are = f"unknown {what} {name!r}; there are {', '.join(known)}"
    good = isinstance(name, str) and name in known
    require(good, or_nearest(there_are, str(name), known))
