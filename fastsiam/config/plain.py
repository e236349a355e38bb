"""Dataclasses out of plain nested dictionaries, which is how files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from fastsiam.errors import in_a_line

from .checks import or_nearest, require
from .methods import METHOD_CONFIGS, MethodConfig
from .setting import checked


def from_plain(kind: Any, value: Any, *, where: str = "") -> Any:
    """Build a value out of what JSON holds of it; a method's settings name the method.

    Args:
        kind: its type.
        value: plain; fields that are missing get their defaults.
        where: what the messages call it.

    Raises:
        ValueError: a field or a method is unknown here, or a value is of another type or makes no
            sense.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        require(isinstance(value, Mapping), f"{where or 'settings'} must be a table, not {value!r}")
        return _dataclass_of(kind, dict(value), where)
    items = get_args(kind)
    if get_origin(kind) is tuple and is_dataclass(items[0]):
        require(isinstance(value, list | tuple), f"{where} must be a list, not {value!r}")
        return tuple(from_plain(items[0], one, where=where) for one in value)
    return checked(kind, value, where)


def _dataclass_of(kind: type, values: dict[str, Any], where: str) -> Any:
    if issubclass(kind, MethodConfig):
        name = values.pop("name", "")
        require(name in METHOD_CONFIGS, f"unknown method {name!r}")
        kind = METHOD_CONFIGS[name]
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for name in values:
        dotted = prefix + in_a_line(name)
        refusal = f"unknown setting {dotted}"
        require(name in known, or_nearest(refusal, dotted, (prefix + one for one in known)))
    return kind(**{k: from_plain(hints[k], v, where=prefix + k) for k, v in values.items()})
