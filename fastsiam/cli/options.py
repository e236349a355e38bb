"""Typer options made out of the config dataclasses, so that every option is written exactly once.

Typer reads a command's parameters from its signature. ``train_command`` builds that signature from
the flags of ``TrainConfig``, ``command_of`` from the fields of one dataclass: name, type, default,
and as help the literal below the field. Typer honours the built ``__signature__``;
tests/cli/test_cli.py holds that it does for every field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import typer

from fastsiam.config import METHOD_CONFIGS, AugmentConfig, MethodConfig, ModelConfig, TrainConfig
from fastsiam.config.flags import Flag, from_flags, to_flags, train_flags
from fastsiam.config.recipes import RECIPES

_RECIPE, _METHOD = "fastsiam.recipe", "fastsiam.method"


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


def train_command(run: Callable[[str, TrainConfig], None]) -> Callable[..., None]:
    """Turn ``run(recipe, config)`` into a Typer command with one option for each flag.

    ``--recipe`` and ``--method`` are read first and give the others their defaults, in whatever
    order all are given. A value that the config refuses is a usage error (exit code 2).
    """
    recipe = typer.Option(
        next(iter(RECIPES)),
        is_eager=True,
        callback=_use_recipe,
        help=f"Named starting point: {', '.join(RECIPES)}. Flags change single settings of it.",
    )
    options = [_parameter("recipe", str, recipe), *map(_option_of, train_flags())]
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )

    def command(context: typer.Context, recipe: str, **flags: Any) -> None:
        for flag in train_flags():
            if issubclass(flag.owner, MethodConfig) and not _given(context, flag.name):
                flags[flag.name] = (context.default_map or {}).get(flag.name)
        try:
            config = from_flags(flags)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(recipe, config)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    return command


def _given(context: typer.Context, name: str) -> bool:
    """Tell whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def command_of(
    run: Callable[..., None],
    cls: type,
    *,
    options: Collection[str] | None = None,
    argument: tuple[str, str] | None = None,
) -> Callable[..., None]:
    """Turn ``run(config)`` into a Typer command with one option for each field of the config.

    Args:
        run: the command.
        cls: of the config.
        options: names of the fields that the command has options for; by default all.
        argument: name and help of a path that stands without a flag; then it is ``run(path,
            config)``.
    """

    def command(**flags: Any) -> None:
        path = [flags.pop(argument[0])] if argument else []
        try:
            config = cls(**flags)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(*path, config)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    hints, docs = get_type_hints(cls), field_docs(cls)
    parameters = [
        _parameter(f.name, hints[f.name], typer.Option(f.default, help=docs[f.name]))
        for f in fields(cls)
        if options is None or f.name in options
    ]
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


def picture_path(path: Path) -> Path:
    """Return the path of a picture to write; another ending than a picture's is a usage error."""
    from fastsiam.report.pictures import check_picture

    try:
        check_picture(path)
    except ValueError as error:
        raise typer.BadParameter(f"--out {error}") from error
    return path


def _use_recipe(context: typer.Context, name: str) -> str:
    recipe_named(name)
    context.meta[_RECIPE] = name
    _use_defaults(context)
    return name


def _use_method(context: typer.Context, name: str) -> str:
    if name not in METHOD_CONFIGS:
        raise typer.BadParameter(f"unknown method {name!r}; there are {', '.join(METHOD_CONFIGS)}")
    context.meta[_METHOD] = name
    _use_defaults(context)
    return name


def _use_defaults(context: typer.Context) -> None:
    """Give all options the defaults of the recipe and the method, as far as these are read."""
    defaults = to_flags(recipe_named(context.meta.get(_RECIPE, next(iter(RECIPES)))))
    own = METHOD_CONFIGS[defaults["method"]]
    chosen = METHOD_CONFIGS[context.meta.get(_METHOD, own.name)]
    if chosen is not own:
        defaults = {
            name: x for name, x in defaults.items() if name not in {f.name for f in fields(own)}
        }
        defaults |= {"method": chosen.name} | {f.name: f.default for f in fields(chosen)}
    context.default_map = defaults


def _option_of(flag: Flag) -> inspect.Parameter:
    """Return the option of a training run's flag; its default comes from recipe and method."""
    kind, name = flag.kind, flag.name
    match (flag.owner, name):
        case _ if flag.owner is ModelConfig and name == "method":
            option = typer.Option(
                next(iter(METHOD_CONFIGS)),
                is_eager=True,
                callback=_use_method,
                help=f"What is trained on the backbone: {', '.join(METHOD_CONFIGS)}.",
            )
        case _ if flag.owner is AugmentConfig and name == "views":
            option = typer.Option(
                2, min=2, help="Views of each image; settings of views: one for all, or a,b."
            )
        case _ if flag.for_each_view:
            metavar = f"{'INTEGER' if kind is int else 'FLOAT'}[,...]"
            option = typer.Option("", metavar=metavar, help=field_docs(flag.owner)[name])
            kind = str
        case _:
            default = next(f.default for f in fields(flag.owner) if f.name == name)
            option = typer.Option(default, help=field_docs(flag.owner)[name])
    return _parameter(name, kind, option)


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
