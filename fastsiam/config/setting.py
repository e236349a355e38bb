"""Settings: default, help text and allowed values, defined once as a field of a ``Config``.

``lr: float = setting(0.05, "Base learning rate.", above=0)`` is a complete definition. Validation,
command-line option and comment in settings files are derived from it.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_TYPES: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("text", str),
    dict: ("a table of settings", {}.__getitem__),
    NoneType: ("nothing", {}.__getitem__),
}
"""Name of each type in messages, and its parser, which raises an error for invalid text."""
_LISTED = 25
"""Most names that an error message lists."""
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a ``Config``."""

    name: str
    kind: Any
    """Its type; a ``Literal`` for choices."""
    default: Any
    help: str
    bounds: Mapping[str, float]
    """Range of a number, by argument name of ``setting``, such as ``{"at_least": 0}``."""
    section: str
    """Heading in ``--help``: first sentence of the docstring of the class that defines it."""
    option: bool
    """Whether the command line has an option for it."""
    nested: type | None
    """Type of its option if it holds other ``Config`` objects, which check their own values."""

    @property
    def flag(self) -> str:
        """Its name on the command line, without leading dashes."""
        return self.name.replace("_", "-")

    @property
    def range(self) -> str:
        """Its range as text, such as "at least 0 and below 1"."""
        return " and ".join(f"{x.replace('_', ' ')} {end}" for x, end in self.bounds.items())

    def convert_value(self, value: Any) -> Any:
        """Convert a value to the setting's type; raise ``ValueError`` if it is not allowed."""
        value = convert_value(self.kind, value, self.flag)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if not all(_COMPARISONS[name](number, end) for name, end in self.bounds.items()):
                raise ValueError(f"{self.flag} must be {self.range}, not {number}")
            is_finite = not isinstance(number, float) or isfinite(number)
            require(is_finite, f"{self.flag} must be finite, not {number}")
        return value


def setting(
    default: _T,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    option: bool = True,
    nested: type | None = None,
) -> _T:
    """Define a dataclass field as a setting.

    To change only the default, a subclass assigns a plain value: ``lr: float = 0.1``.

    Args:
        help: the help text, with the unit.
        above, at_least, below, at_most: range of the number, or of each number in a tuple.
        option: whether the command line has an option for it; ``--set`` takes every setting.
        nested: for a field that holds other ``Config`` objects, the type of its option.
    """
    ends = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    bounds = {name: end for name, end in ends.items() if end is not None}
    metadata = {"help": help, "bounds": bounds, "option": option, "nested": nested}
    value: _T = field(default=default, metadata=metadata)
    return value


class Config:
    """A group of settings: a frozen dataclass that converts and checks its values."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in settings_of(type(self)).values():
            if not one.nested:
                object.__setattr__(self, one.name, one.convert_value(getattr(self, one.name)))
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""

    def check_given(self, given: Collection[str]) -> None:
        """Raise ``ValueError`` if the user passed a setting that has no effect.

        Args:
            given: names of the settings passed on the command line; others may come from a run.
        """

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Build the group from values by setting name. Values may be text.

        Missing settings get their defaults; settings of other groups are ignored.

        Raises:
            ValueError: a value is not allowed.
        """
        return cls(**{name: flags[name] for name in settings_of(cls) if name in flags})

    def to_flags(self) -> dict[str, Any]:
        """Return the values of all settings by name."""
        return {name: getattr(self, name) for name in settings_of(type(self))}


def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings of a ``Config`` by name, those of its base classes first."""
    return _settings_of(cls)


@cache
def _settings_of(cls: Any) -> dict[str, Setting]:
    hints, settings = get_type_hints(cls), {}
    groups: list[Any] = [base for base in cls.__mro__ if is_dataclass(base)]
    for dataclass_field in fields(cls):
        bases = [base for base in groups if dataclass_field.name in base.__dataclass_fields__]
        candidates = [base.__dataclass_fields__[dataclass_field.name].metadata for base in bases]
        if metadata := next(filter(None, candidates), None):  # a changed default has no metadata
            kind, section = metadata["nested"] or hints[dataclass_field.name], title(bases[-1])
            settings[dataclass_field.name] = Setting(
                dataclass_field.name, kind, dataclass_field.default, section=section, **metadata
            )
    return settings


def title(documented: object) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    first = inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].rstrip(".")


def convert_value(kind: Any, value: Any, name: str) -> Any:
    """Convert a plain value, from a file or the command line, to a type.

    Text is parsed if the type is a number, a bool or a tuple. Lists become tuples, and mappings
    become dataclasses, whose missing fields get their defaults.

    Args:
        name: name of the setting, for error messages.

    Raises:
        ValueError: the value cannot be converted, or a key is not a field of the dataclass.
    """
    items, origin = get_args(kind), get_origin(kind)
    if origin in (Union, UnionType):
        for one in items:
            with contextlib.suppress(ValueError):
                return convert_value(one, value, name)
    elif origin is Literal:
        for item in items:
            if value == item or value == str(item):
                return item
    elif origin is tuple:
        if isinstance(value, str):
            value = [part for part in value.strip("[]").split(",") if part]
        if isinstance(value, list | tuple):
            kinds = items[:1] * len(value) if items[-1] is Ellipsis else items
            if len(kinds) == len(value):
                pairs = zip(kinds, value, strict=True)
                return tuple(convert_value(one, item, name) for one, item in pairs)
    elif is_dataclass(kind):
        if isinstance(value, kind):  # type: ignore[arg-type]
            return value
        if isinstance(value, Mapping):
            return _dataclass_of(kind, value, f"{name}." if name else "")
    elif type(value) is kind:
        return value
    elif (kind is float and type(value) is int) or isinstance(value, str):
        with contextlib.suppress(ValueError, KeyError, OverflowError):
            return _TYPES[kind][1](value)
    raise ValueError(f"{name or 'settings'} must be {_description(kind)}, not {value!r}")


def _dataclass_of(kind: Any, values: Mapping[Any, Any], prefix: str) -> Any:
    hints = get_type_hints(kind)
    known_names = [f"{prefix}{one.name}" for one in fields(kind)]
    for name in values:
        check_name("setting", f"{prefix}{name}", known_names)
    return kind(**{k: convert_value(hints[k], v, f"{prefix}{k}") for k, v in values.items()})


def _description(kind: Any) -> str:
    """Return the name of a type for messages."""
    items, origin = get_args(kind), get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_description, items))
    if origin is Literal:
        return f"one of {', '.join(filter(None, map(str, items)))}"
    if origin is tuple:
        return "values separated by commas" if items[-1] is ... else f"{len(items)} numbers"
    if is_dataclass(kind):
        return "a table of settings"
    return _TYPES[kind][0] if kind in _TYPES else f"of a type that settings can have, not {kind}"


def as_text(value: Any) -> str:
    """Format a value for the command line: a tuple as ``a,b``."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise ``ValueError`` if a name is unknown; suggest the closest known one."""
    if name not in known:
        choices = f"choose one of {', '.join(filter(None, known))}"
        if len(known) > _LISTED:
            choices = "`fastsiam config` prints all"
        raise ValueError(f"unknown {what} {name!r}; {nearest(str(name), known) or choices}")


def nearest(name: str, known: Iterable[str], *, most: int = 1, alike: float = 0.6) -> str:
    """Return "did you mean a or b?" for a misspelt name, or "" if no known name is similar.

    Args:
        most: maximum number of suggestions.
        alike: minimum similarity, from 0 to 1.
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=most, cutoff=alike)
    return f"did you mean {' or '.join(close)}?" if close else ""
