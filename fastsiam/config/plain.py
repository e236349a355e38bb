"""Settings as plain nested dictionaries, which is how files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from .checks import require
from .model import METHOD_CONFIGS, MethodConfig


def to_plain(value: Any) -> Any:
    """Return a setting, or all of them, as plain values; a method's settings begin with its name.

    Args:
        value: a dataclass of this package, or what one holds.
    """
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if not is_dataclass(value):
        return value
    named = {"name": value.name} if isinstance(value, MethodConfig) else {}
    return named | {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}


def from_plain(kind: Any, value: Any, *, where: str = "") -> Any:
    """Rebuild what ``to_plain`` took apart.

    Args:
        kind: type of what is rebuilt.
        value: plain; fields that are missing get their defaults.
        where: what the messages call it.

    Raises:
        ValueError: a field or a method is unknown here, or a value makes no sense.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        require(isinstance(value, Mapping), f"{where or 'settings'} must be a table: {value!r}")
        values = dict(value)
        if issubclass(kind, MethodConfig):
            name = values.pop("name", "")
            require(name in METHOD_CONFIGS, f"unknown method {name!r}")
            kind = METHOD_CONFIGS[name]
        hints = get_type_hints(kind)
        known = {f.name for f in fields(kind)}
        prefix = f"{where}." if where else ""
        for name in values:
            require(name in known, f"unknown setting {prefix}{name}")
        return kind(**{k: from_plain(hints[k], v, where=f"{prefix}{k}") for k, v in values.items()})
    if isinstance(value, (list, tuple)):
        item = get_args(kind)[0] if get_origin(kind) is tuple else None
        return tuple(from_plain(item, each, where=where) for each in value)
    return value
