"""What the settings are for, as their dataclasses say it: for ``--help`` and settings files."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Map the name of each field of a dataclass to the string literal below it."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if is_dataclass(base):
            docs |= field_docs(base)
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for first, second in pairwise(body.body):
        match first, second:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                docs[name] = text
    return docs


def heading(cls: type) -> str:
    """Return what a group of settings is about: the first sentence of its dataclass's docstring."""
    first = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].rstrip(".")


def owner_of(cls: type, field: str) -> type:
    """Return the dataclass that first has a field: the class itself, or one that it is made of."""
    owners = [base for base in cls.__mro__ if field in inspect.get_annotations(base)]
    return owners[-1]
