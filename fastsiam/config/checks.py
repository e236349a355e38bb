"""The ways to refuse a setting."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def share(text: str, name: str) -> float:
    """Return the percent of a share such as "10%", 0 of an empty one.

    Args:
        text: the setting.
        name: of the setting, for the message.

    Raises:
        ValueError: it is no share above 0% and below 100%.
    """
    if not text:
        return 0.0
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    good = text.endswith("%") and 0 < percent < 100
    require(good, f"{name} is a share above 0% and below 100%, such as 10%, not {text!r}")
    return percent
