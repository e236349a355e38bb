"""A setting: its default, what it is for, and which values it takes, all written once.

``lr: float = setting(0.05, "Base learning rate.", above=0)`` is a field of a ``Config``. From it
follow the check of its value, its option with its ``--help``, and its comment in a settings file.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .checks import or_nearest

_T = TypeVar("_T")
_CALLED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "nothing",
}
_CONVERTED: dict[Any, Callable[[Any], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
}


class Bounds(dict[str, float]):
    """The range of a number, by the names of ``setting``'s arguments."""

    def contain(self, value: float) -> bool:
        """Tell whether a number lies within; nan lies within no bounds."""
        return all(_COMPARISONS[name](value, bound) for name, bound in self.items())

    def __str__(self) -> str:
        """Return the range for messages, such as "at least 0 and below 1"."""
        if self.keys() == {"at_least", "at_most"}:
            return f"from {self['at_least']} to {self['at_most']}"
        return " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in self.items())


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a group of settings."""

    name: str
    kind: Any
    """Its type; a ``Literal`` has its choices."""
    default: Any
    help: str
    bounds: Bounds
    owner: type
    """The ``Config`` that has it."""
    section: str
    """What the settings beside it in ``--help`` and files are about."""
    option: bool = True
    """Whether there is an option for it."""
    flat: type | None = None
    """What stands on the command line for the groups of settings that it holds, if it does."""

    @property
    def flag(self) -> str:
        """Its name as the command line spells it, without the dashes before it."""
        return self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ``ValueError`` unless the value is of the setting's type, choices and range."""
        checked(self.kind, value, self.flag)
        numbers = value if isinstance(value, tuple | list) else [value]
        if value is not None and not all(map(self.bounds.contain, numbers)):
            raise ValueError(f"{self.flag} must be {self.bounds}, not {value}")


def setting(
    default: _T,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    option: bool = True,
    flat: type | None = None,
) -> _T:
    """Return the field of a setting. A subclass may change its default alone: ``lr: float = 0.1``.

    Args:
        default: its value unless another is given.
        help: what it is for, with the unit.
        above, at_least, below, at_most: range of a number, or of each number of several.
        option: whether there is an option for it.
        flat: of a field that holds other groups, the type that stands for it on the command line.
    """
    ends = {"above": above, "at_least": at_least, "below": below, "at_most": at_most}
    bounds = Bounds({name: end for name, end in ends.items() if end is not None})
    metadata = {"help": help, "bounds": bounds, "option": option, "flat": flat}
    value: _T = field(default=default, metadata=metadata)
    return value


class Config:
    """A group of settings: a frozen dataclass whose values are checked when one is built."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in settings_of(type(self)).values():
            if one.flat is None:
                one.check(getattr(self, one.name))
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""


def settings_of(cls: type, section: str = "") -> dict[str, Setting]:
    """Return the settings of a ``Config`` by name, without fields that hold other groups.

    Args:
        cls: the dataclass.
        section: what they are about; by default what the class that first has each is about.
    """
    return _settings_of(cls, section)


@cache
def _settings_of(cls: Any, section: str) -> dict[str, Setting]:
    hints, settings = get_type_hints(cls), {}
    groups: list[Any] = [base for base in cls.__mro__ if is_dataclass(base)]
    for own in fields(cls):
        bases = [base for base in groups if own.name in base.__dataclass_fields__]
        each = [base.__dataclass_fields__[own.name].metadata for base in bases]
        metadata = next(filter(None, each), None)  # a changed default has none of its own
        if metadata:
            settings[own.name] = Setting(
                name=own.name,
                kind=metadata["flat"] or hints[own.name],
                default=own.default,
                owner=cls,
                section=section or title(bases[-1]),
                **metadata,
            )
    return settings


def title(documented: object) -> str:
    """Return what a group of settings or a command is about: its docstring's first sentence."""
    first = inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].rstrip(".")


def checked(kind: Any, value: Any, name: str, *, text: bool = False) -> Any:
    """Return a value as its type has it: a float for a whole number, a tuple for a list.

    Args:
        kind: the type.
        value: plain, as files and flags have it.
        name: of the setting, for the message.
        text: whether a text may stand for a number, for true or false, or for a list of these.

    Raises:
        ValueError: it is of another type, or none of the choices.
    """
    items, origin = get_args(kind), get_origin(kind)
    if origin in (Union, UnionType):
        for one in items:
            with contextlib.suppress(ValueError):
                return checked(one, value, name, text=text)
    elif origin is Literal:
        if value in items:
            return value
    elif origin is tuple:
        if text and isinstance(value, str):
            value = value.strip("[]").split(",")
        if isinstance(value, list | tuple):
            kinds = items[:1] * len(value) if items[-1] is Ellipsis else items
            if len(kinds) == len(value):
                pairs = zip(kinds, value, strict=True)
                return tuple(checked(one, item, name, text=text) for one, item in pairs)
    elif type(value) is kind:
        return value
    elif (kind is float and type(value) is int) or (text and isinstance(value, str)):
        with contextlib.suppress(ValueError, KeyError, OverflowError):
            return _CONVERTED[kind](value)
    raise ValueError(_refusal(name, kind, value))


def _refusal(name: str, kind: Any, value: Any) -> str:
    """Return the message that a value is not of a type, with the nearest choice if there is one."""
    message = f"{name} must be {_called(kind)}, not {value!r}"
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return or_nearest(message, value, choices) if isinstance(value, str) else message


def _called(kind: Any) -> str:
    """Return what a message calls a type."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_called, get_args(kind)))
    if get_origin(kind) is Literal:
        *others, last = map(str, get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(kind) is tuple:
        items = get_args(kind)
        several = items[-1] is Ellipsis
        return f"a list of {_called(items[0])}" if several else f"{len(items)} numbers"
    return _CALLED.get(kind, str(kind))
