"""Typer options made out of the config dataclasses, so that every option is written exactly once.

Typer reads a command's parameters from its signature. ``settings_command`` builds that signature
from the flags of ``TrainConfig``, ``command_of`` from the fields of one dataclass: name, type,
default, and as help the literal below the field. Typer honours the built ``__signature__``;
tests/cli/test_options.py holds that it does for every field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from fastsiam.cli.help import show_all
from fastsiam.config.docs import field_docs, heading, owner_of
from fastsiam.config.files import (
    Settings,
    layered,
    read_settings,
    recorded,
    run_folder,
)
from fastsiam.config.flags import BRANCH_SETTINGS, Flag, from_flags, to_flags, train_flags
from fastsiam.config.recipes import RECIPES

_CHOSEN = "fastsiam.chosen"
"""Key of what is known of the settings while the options are read."""
_FRESH = "auto", "never", ""
"""Values of ``--resume`` that name no run."""
_OF_A_BRANCH = *BRANCH_SETTINGS, "restarts", "extend", "extend_schedule"
"""Settings in which a branch may differ from the run that it branched off."""


def settings_command(
    run: Callable[..., None],
    *,
    options: Collection[str] | None = None,
    build: Callable[[Mapping[str, Any]], Any] = from_flags,
    beside: type | None = None,
) -> Callable[..., None]:
    """Turn ``run(recipe, config)`` into a Typer command with options for a training run's settings.

    ``--recipe``, ``--method``, ``--config`` and what names a run are read first and give the others
    their defaults, in whatever order all are given. A value that the config refuses is a usage
    error (exit code 2).

    Args:
        run: the command; parameters of its own beside the two become options as in any command.
        options: names of the flags that there are options for; by default all.
        build: makes the config out of every flag's value.
        beside: a dataclass of settings beside these; then it is ``run(recipe, config, beside)``.
    """
    recipe = typer.Option(
        next(iter(RECIPES)),
        is_eager=True,
        callback=_use_recipe,
        help=f"Named starting point: {', '.join(RECIPES)}. Flags change single settings of it.",
    )
    file = typer.Option(
        None,
        is_eager=True,
        callback=_use_file,
        help="Settings: a TOML or YAML file, or a run, whose config.json is read. They beat the "
        "recipe's; flags beat them. fastsiam config writes such a file.",
    )
    every = typer.Option(
        False, "--help-all", is_eager=True, callback=show_all, help="Show all options and exit."
    )
    own = _own_parameters(run, 2 if beside is None else 3)
    fields_beside = [] if beside is None else _options_of(beside)
    flags = [flag for flag in train_flags() if options is None or flag.name in options]
    defaults = layered().flags
    parameters = [
        inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        ),
        _parameter("recipe", str, recipe),
        _parameter("config", Path | None, file),
        *own,
        *fields_beside,
        *(_option_of(flag, defaults) for flag in flags),
        *([] if options else [_parameter("help_all", bool, every)]),
    ]

    def command(context: typer.Context, **given: Any) -> None:
        changed = {f.name: given[f.name] for f in flags if _given(context, f.name)}
        settings = _of_a_branch(context, changed.get("out", "")) or _defaults(context)
        try:
            built = [build({**settings.flags, **changed})]
            if beside is not None:
                built.append(beside(**{x.name: given[x.name] for x in fields_beside}))
        except ValueError as error:
            where = f" (with the settings of {settings.source})" if settings.source else ""
            raise typer.BadParameter(f"{error}{where}") from error
        run(settings.recipe, *built, **{x.name: given[x.name] for x in own})

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def command_of(
    run: Callable[..., None],
    cls: type,
    *,
    options: Collection[str] | None = None,
    argument: tuple[str, str] | None = None,
    kind: Any = Path,
) -> Callable[..., None]:
    """Turn ``run(config)`` into a Typer command with one option for each field of the config.

    Args:
        run: the command.
        cls: of the config; options are in sections if it inherits some.
        options: names of the fields that the command has options for; by default all.
        argument: name and help of what stands without a flag; then it is ``run(argument,
            config)``.
        kind: type of the argument.
    """

    def command(**flags: Any) -> None:
        own = [flags.pop(argument[0])] if argument else []
        try:
            config = cls(**flags)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        run(*own, config)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    parameters = [x for x in _options_of(cls) if options is None or x.name in options]
    if argument:
        name, text = argument
        parameters.insert(0, _parameter(name, kind, typer.Argument(help=text)))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _options_of(cls: type) -> list[inspect.Parameter]:
    """Return an option for each field of a dataclass, in sections if it inherits some."""
    hints, docs = get_type_hints(cls), field_docs(cls)
    owners = {f.name: owner_of(cls, f.name) for f in fields(cls)}
    several = len(set(owners.values())) > 1
    return [
        _parameter(
            f.name,
            hints[f.name],
            typer.Option(
                f.default,
                help=docs[f.name],
                rich_help_panel=heading(owners[f.name]) if several else None,
            ),
        )
        for f in fields(cls)
    ]


def picture_path(path: Path) -> Path:
    """Return the path of a picture to write; another ending than a picture's is a usage error."""
    from fastsiam.report.pictures import check_picture

    try:
        check_picture(path)
    except ValueError as error:
        raise typer.BadParameter(f"--out {error}") from error
    return path


def use_run(context: typer.Context, path: str) -> str:
    """Take all settings from a run: a callback of an option that names its folder or checkpoint."""
    if path not in _FRESH:
        _choose(context, run=_settings_of_run(Path(path)))
    return path


def _resume(context: typer.Context, path: str) -> str:
    """Take all settings from the run that goes on, in its folder if no other is given."""
    if path not in _FRESH:
        settings, folder = _settings_of_run(Path(path)), run_folder(Path(path))
        place = {"resume": path, "out": "" if folder is None else str(folder)}
        _choose(context, run=replace(settings, flags={**settings.flags, **place}))
    return path


def _settings_of_run(path: Path) -> Settings:
    """Read the config.json of a run, or a checkpoint's own settings where there is none."""
    file = recorded(path)
    if file is None:
        from fastsiam import checkpoint

        return Settings(source=str(path), flags=to_flags(checkpoint.load(path).config))
    try:
        return read_settings(file, goes_on=True)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        try:
            _choose(context, file=read_settings(path))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return path


def _use_recipe(context: typer.Context, name: str) -> str:
    _choose(context, **({"recipe": name} if _given(context, "recipe") else {}))
    return name


def _use_method(context: typer.Context, name: str) -> str:
    if _given(context, "method"):
        _choose(context, method=name)
    return name


def _choose(context: typer.Context, **chosen: Any) -> None:
    """Note what else is known of the settings, and give all options their defaults anew."""
    context.meta.setdefault(_CHOSEN, {}).update(chosen)
    settings = _defaults(context)
    defaults: dict[str, Any] = {"recipe": settings.recipe, **settings.flags}
    for parameter in context.command.params:
        of_settings = parameter.name == "recipe" or getattr(parameter, "rich_help_panel", None)
        if of_settings and parameter.name in defaults:  # a command may have others of that name
            parameter.default = defaults[parameter.name]


def _defaults(context: typer.Context) -> Settings:
    """Return every setting as it is without the flags of the command line."""
    chosen = context.meta[_CHOSEN]
    files = [chosen[kind] for kind in ("run", "file") if kind in chosen]
    try:
        found = layered(
            recipe=chosen.get("recipe", ""), method=chosen.get("method", ""), files=files
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if "run" in chosen and not found.flags["out"]:  # a file that names no folder asks for no other
        return replace(found, flags={**found.flags, "out": chosen["run"].flags["out"]})
    return found


def _of_a_branch(context: typer.Context, out: str) -> Settings | None:
    """Return the settings of a branch that has begun: its optimiser's are its own.

    Args:
        context: of the command.
        out: the run folder that is given.
    """
    chosen = context.meta[_CHOSEN]
    if "run" not in chosen or not out or not (Path(out) / "config.json").is_file():
        return None
    begun = _settings_of_run(Path(out))
    own = {name: begun.flags[name] for name in _OF_A_BRANCH if name in begun.flags}
    flags = {**chosen["run"].flags, **own}
    context.meta[_CHOSEN] = {**chosen, "run": replace(chosen["run"], flags=flags)}
    return _defaults(context)


def _given(context: typer.Context, name: str) -> bool:
    """Tell whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _own_parameters(run: Callable[..., None], given: int) -> list[inspect.Parameter]:
    """Return what a command takes beside the first ``given``, recipe and config."""
    hints = get_type_hints(run, include_extras=True)
    own = list(inspect.signature(run).parameters.values())[given:]
    return [x.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[x.name]) for x in own]


def _option_of(flag: Flag, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Return the option of a training run's flag."""
    kind, how = flag.kind, dict[str, Any](help=flag.help, rich_help_panel=flag.heading)
    if flag.name in defaults:
        default = defaults[flag.name]
    else:  # of another method
        default = next(f.default for f in fields(flag.owner) if f.name == flag.name)
    if flag.name == "restarts":  # what --extend-schedule restart notes in a run's settings
        how |= {"hidden": True}
    if flag.name in _CALLBACKS:
        how |= {"is_eager": True, "callback": _CALLBACKS[flag.name]}
    if flag.name == "views":
        how |= {"min": 2}
    if flag.for_each_view:
        how |= {"metavar": f"{'INTEGER' if kind is int else 'FLOAT'}[,...]"}
        kind, default = str, str(default)
    return _parameter(flag.name, kind, typer.Option(default, **how))


_CALLBACKS = {"method": _use_method, "resume": _resume}
"""What the flags do that give others their defaults."""


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    annotation = str if annotation == int | str else annotation  # Typer knows no unions
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
