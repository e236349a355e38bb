"""The options of commands that take settings, made out of the settings' classes.

An option that is not given is None. ``in_force`` says which value its setting has then, and
``--help`` shows that as the default.

Typer reads a command's options from the signature of its function, and each version of Typer has
another constructor of options. A function's ``__signature__`` (PEP 362) is what they all read, so
``_with_options`` sets it: the one place that does.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from fastsiam.cli.help import show_all
from fastsiam.config.files import (
    Settings,
    assigned,
    layered,
    read_settings,
    recorded,
    run_folder,
)
from fastsiam.config.flags import (
    BRANCH_SETTINGS,
    from_flags,
    is_of_a_view,
    to_flags,
    train_settings,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Setting, settings_of

_FRESH = "auto", "never", ""
"""Values of ``--resume`` that name no run."""
_OF_A_BRANCH = *BRANCH_SETTINGS, "restarts", "extend", "extend_schedule"
"""Settings in which a branch may differ from the run that it branched off."""
_READ_FIRST = "method", "resume"
"""Options that ``--help`` behind them shows the defaults of."""


def settings_command(
    run: Callable[..., None],
    *,
    options: Collection[str] | None = None,
    build: Callable[[Mapping[str, Any]], Any] = from_flags,
    beside: type | None = None,
) -> Callable[..., None]:
    """Turn ``run(recipe, config)`` into a Typer command with options for a training run's settings.

    A value that the config refuses is a usage error (exit code 2).

    Args:
        run: the command; parameters of its own beside the two become options as in any command.
        options: names of the settings that there are options for; by default all.
        build: makes the config out of every setting's value.
        beside: a ``Config`` beside these; then it is ``run(recipe, config, beside)``.
    """
    hints = get_type_hints(run, include_extras=True)
    own = [
        x.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[x.name])
        for x in [*inspect.signature(run).parameters.values()][2 if beside is None else 3 :]
    ]
    settings = [
        one for one in train_settings() if one.option and (options is None or one.name in options)
    ]
    others = [] if beside is None else [*settings_of(beside).values()]

    def command(**given: Any) -> None:
        chosen = {x.name: given.pop(x.name) for x in own}
        with usage_errors():
            given = _given(given)
            found = in_force(given | {"run": chosen.get("run")})
        changed = {one.name: given[one.name] for one in train_settings() if one.name in given}
        with usage_errors(found.source):
            built = [build({**found.flags, **changed})]
            if beside is not None:
                built.append(beside(**{x.name: given[x.name] for x in others if x.name in given}))
        run(found.recipe, *built, **chosen)

    def notes(given: Mapping[str, Any]) -> dict[str, str]:
        with usage_errors():
            found = in_force(_given(given))
        values = {one.name: found.flags.get(one.name, one.default) for one in settings}
        values |= {one.name: one.default for one in others}
        of_recipe = {"recipe": f"default: {found.recipe}"}
        return of_recipe | {one.name: _note(one, values[one.name]) for one in [*others, *settings]}

    parameters = [
        *_sources(),
        *own,
        *(_option(one, section=None) for one in others),
        *(_option(one, section=one.section) for one in settings),
        *([] if options else [_help_all()]),
    ]
    return _with_options(command, run, parameters, notes)


def command_of(
    run: Callable[..., None],
    cls: type,
    *,
    options: Collection[str] | None = None,
    argument: tuple[str, str] | None = None,
    kind: Any = Path,
) -> Callable[..., None]:
    """Turn ``run(config)`` into a Typer command with one option for each setting of a ``Config``.

    Args:
        run: the command.
        cls: of the config; options are in sections if it inherits some.
        options: names of the settings that the command has options for; by default all.
        argument: name and help of what stands without a flag; then it is ``run(argument,
            config)``.
        kind: type of the argument.
    """
    settings = [one for one in settings_of(cls).values() if options is None or one.name in options]
    several = len({one.section for one in settings}) > 1

    def command(**given: Any) -> None:
        own = [given.pop(argument[0])] if argument else []
        with usage_errors():
            config = cls(**_given(given))
        run(*own, config)

    parameters = [_option(one, section=one.section if several else None) for one in settings]
    if argument:
        name, text = argument
        parameters.insert(0, _parameter(name, kind, typer.Argument(help=text)))
    notes = {one.name: _note(one, one.default) for one in settings}
    return _with_options(command, run, parameters, lambda given: notes)


def in_force(given: Mapping[str, Any]) -> Settings:
    """Return every setting as it is without its own flag: recipe < method < run < file.

    Args:
        given: values of options, of which ``recipe``, ``method``, ``config``, ``resume``, ``run``
            and ``out`` matter here.

    Raises:
        ValueError: one of them names nothing that holds settings.
    """
    files = [read_settings(given["config"])] if given.get("config") else []
    in_files = [file.flags["resume"] for file in files if "resume" in file.flags]
    resumed = given.get("resume") or next(iter(in_files), "")
    run = None
    if resumed not in _FRESH:
        run = _resumed_run(resumed, given.get("out", ""))
    elif given.get("run"):
        run = _settings_of_run(Path(given["run"]))
    found = layered(
        recipe=given.get("recipe", ""),
        method=given.get("method", ""),
        files=files if run is None else [run, *files],
    )
    if run is not None and not found.flags["out"]:  # a file that names no folder asks for no other
        return replace(found, flags={**found.flags, "out": run.flags["out"]})
    return found


@contextlib.contextmanager
def usage_errors(source: str = "") -> Iterator[None]:
    """Turn a ``ValueError`` inside into a usage error, with where settings are from."""
    try:
        yield
    except ValueError as error:
        where = f" (with the settings of {source})" if source else ""
        raise typer.BadParameter(f"{error}{where}") from error


def picture_path(path: Path) -> Path:
    """Return the path of a picture to write; another ending than a picture's is a usage error."""
    from fastsiam.report.pictures import check_picture

    try:
        check_picture(path)
    except ValueError as error:
        raise typer.BadParameter(f"--out {error}") from error
    return path


def _resumed_run(path: str, out: str) -> Settings:
    """Return the settings of a run that is resumed, in its own folder or in a branch's.

    A branch that has begun has settings of the optimizer of its own.
    """
    run, folder = _settings_of_run(Path(path)), run_folder(Path(path))
    place = {"resume": path, "out": "" if folder is None else str(folder)}
    flags = {**run.flags, **place}
    if out and (Path(out) / "config.json").is_file():
        begun = _settings_of_run(Path(out)).flags
        flags |= {name: begun[name] for name in _OF_A_BRANCH if name in begun}
    return replace(run, flags=flags)


def _settings_of_run(path: Path) -> Settings:
    """Read the config.json of a run, or a checkpoint's own settings where there is none."""
    file = recorded(path)
    if file is not None:
        return read_settings(file, goes_on=True)
    from fastsiam import checkpoint

    return Settings(source=str(path), flags=to_flags(checkpoint.load(path).config))


def _sources() -> list[inspect.Parameter]:
    """Return the options that say where settings are from."""
    recipe = typer.Option(
        None,
        is_eager=True,
        help=f"Named starting point: {', '.join(RECIPES)}. Flags change single settings of it.",
    )
    file = typer.Option(
        None,
        is_eager=True,
        help="Settings: a TOML or YAML file, or a run, whose config.json is read. They beat the "
        "recipe's; flags beat them. fastsiam config writes such a file.",
    )
    single = typer.Option(
        None,
        "--set",
        is_eager=True,
        metavar="NAME=VALUE",
        help="A setting, as in a settings file, such as lr_end=0.001; may be given several times. "
        "Some settings have no flag of their own; fastsiam config lists all.",
    )
    return [
        _parameter("recipe", str | None, recipe),
        _parameter("config", Path | None, file),
        _parameter("assignments", list[str] | None, single),
    ]


def _help_all() -> inspect.Parameter:
    option = typer.Option(
        False, "--help-all", is_eager=True, callback=show_all, help="Show all options and exit."
    )
    return _parameter("help_all", bool, option)


def _option(one: Setting, *, section: str | None) -> inspect.Parameter:
    """Return the option of a setting, which is None unless it is given."""
    how = dict[str, Any](help=one.help, rich_help_panel=section, is_eager=one.name in _READ_FIRST)
    kind = str if one.kind == int | str else one.kind  # Typer knows no unions
    if is_of_a_view(one):
        how |= {"metavar": f"{'INTEGER' if kind is int else 'FLOAT'}[,...]"}
        kind = str
    return _parameter(one.name, kind | None, typer.Option(None, **how))


def _note(one: Setting, value: Any) -> str:
    """Return what ``--help`` says of a setting behind what it is for: default, range of shares."""
    match value:
        case bool():
            text = one.flag if value else f"no-{one.flag}"
        case tuple():
            text = ", ".join(map(str, value))
        case _:
            text = "" if value is None else str(value)
    ends = one.bounds.below or one.bounds.at_most
    return "; ".join(filter(None, [text and f"default: {text}", str(one.bounds) if ends else ""]))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that are given, those by ``--set`` too."""
    given = {name: value for name, value in options.items() if value is not None}
    return assigned(given.pop("assignments", ())) | given


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


def _with_options(
    command: Callable[..., None],
    run: Callable[..., None],
    options: list[inspect.Parameter],
    notes: Callable[[Mapping[str, Any]], Mapping[str, str]],
) -> Callable[..., None]:
    """Give a command the name and help of the function that it runs, and its options.

    Args:
        command: takes the options' values.
        run: what it runs.
        options: its options.
        notes: returns what ``fastsiam.cli.help.Command`` shows behind the help of options, by the
            values of those that are read first.
    """
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    command.notes = notes  # type: ignore[attr-defined]
    return command
