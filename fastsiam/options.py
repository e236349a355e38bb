"""Typer options made out of the config dataclasses, so that every option is written exactly once.

Typer reads a command's parameters from its signature. ``command_from`` builds that signature from
the fields of ``TrainConfig``'s sections, ``command_of`` from those of one dataclass: name, type,
default, and as help the literal below the field. Typer honours the built ``__signature__``;
tests/test_cli.py holds that it does for every field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection
from dataclasses import asdict, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import typer

from fastsiam.config import TrainConfig
from fastsiam.recipes import RECIPES


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


def command_from(run: Callable[[str, TrainConfig], None]) -> Callable[..., None]:
    """Turn ``run(recipe, config)`` into a Typer command with ``--recipe`` and one flag a field.

    A flag beats the recipe, the recipe beats the dataclass's default, in whatever order they are
    given. A value that the config refuses is a usage error (exit code 2).
    """
    sections: dict[str, type] = get_type_hints(TrainConfig)
    home: dict[str, str] = {}
    parameters = [
        _parameter(
            "recipe",
            str,
            typer.Option(
                next(iter(RECIPES)),
                is_eager=True,
                callback=_use_recipe,
                help=f"Named starting point: {', '.join(RECIPES)}. "
                "Flags change single settings of it.",
            ),
        )
    ]
    for section, cls in sections.items():
        for f in fields(cls):
            assert f.name not in home, f"{f.name} is in two sections; flags are flat"
            home[f.name] = section
        parameters += _parameters(cls)

    def command(recipe: str, **flags: Any) -> None:
        parts: dict[str, dict[str, Any]] = {section: {} for section in sections}
        for name, value in flags.items():
            parts[home[name]][name] = value
        try:
            config = TrainConfig.from_dict(parts)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(recipe, config)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def command_of(
    run: Callable[..., None],
    cls: type,
    only: Collection[str] | None = None,
    *,
    argument: tuple[str, str] | None = None,
    without: Collection[str] = (),
) -> Callable[..., None]:
    """Turn ``run(config)`` into a Typer command with one flag for each field of the config.

    Args:
        run: the command.
        cls: of the config.
        only: fields that get a flag; by default all.
        argument: name and help of a path that stands without a flag; then it is ``run(path,
            config)``.
        without: fields that get none.
    """

    def command(**flags: Any) -> None:
        path = [flags.pop(argument[0])] if argument else []
        try:
            config = cls(**flags)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(*path, config)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    parameters = [p for p in _parameters(cls) if only is None or p.name in only]
    parameters = [p for p in parameters if p.name not in without]
    if argument:
        name, text = argument
        parameters.insert(0, _parameter(name, Path, typer.Argument(help=text)))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def recipe_named(name: str) -> TrainConfig:
    """Return a recipe's settings; an unknown name is a usage error."""
    if name not in RECIPES:
        raise typer.BadParameter(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


def _use_recipe(context: typer.Context, name: str) -> str:
    recipe = asdict(recipe_named(name))
    context.default_map = {k: v for section in recipe.values() for k, v in section.items()}
    return name


def _parameters(cls: type) -> list[inspect.Parameter]:
    hints, docs = get_type_hints(cls), field_docs(cls)
    return [
        _parameter(f.name, hints[f.name], typer.Option(f.default, help=docs[f.name]))
        for f in fields(cls)
    ]


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
