"""The options of commands that take settings, made out of the settings' classes.

An option that is not given is None. ``merge_sources`` says which value its setting has then, and
``--help`` shows that as the default.

Typer reads a command's options from the signature of its function, and each version of Typer has
another constructor of options. A function's ``__signature__`` (PEP 362) is what they all read, so
``with_options`` sets it: the one place that does.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from fastsiam.cli.help import Command, Group, show_all
from fastsiam.config.files import (
    Settings,
    merge,
    parse_assignments,
    read_settings,
    recorded,
    run_folder,
)
from fastsiam.config.flags import (
    BRANCH_SETTINGS,
    SEVERAL,
    from_flags,
    is_of_a_view,
    to_flags,
    train_settings,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Config, Setting, settings_of

_FRESH = "auto", "never", ""
"""Values of ``--resume`` that name no run."""
_OF_A_BRANCH = *BRANCH_SETTINGS, "restarts", "extend", "extend_schedule"
"""Settings in which a branch may differ from the run that it branched off."""
_READ_FIRST = "method", "resume"
"""Options that ``--help`` behind them shows the defaults of."""


class Commands(typer.Typer):
    """A Typer app whose commands may take settings, and whose help is ``fastsiam.cli.help``'s."""

    def __init__(self, *, cls: type[Group] = Group, **how: Any) -> None:
        super().__init__(cls=cls, **how)

    def command(  # type: ignore[override]
        self,
        name: str | None = None,
        *,
        options: Collection[str] | None = None,
        build: Callable[[Mapping[str, Any]], Any] = from_flags,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator of a command; the arguments are those of ``with_options``."""

        def added(run: Callable[..., Any]) -> Callable[..., Any]:
            command = with_options(run, options=options, build=build)
            super(Commands, self).command(name, cls=Command)(command)
            return run

        return added


def with_options(
    run: Callable[..., None],
    *,
    options: Collection[str] | None = None,
    build: Callable[[Mapping[str, Any]], Any] = from_flags,
) -> Callable[..., None]:
    """Return a Typer command with options for the settings that a function takes.

    A parameter that is a ``Config`` becomes an option for each of its settings. If there is one
    named ``recipe``, without a default, ``config`` is that of a training run, and its settings come
    from recipe, method, run and file where no flag gives them. Values that are refused are usage
    errors (exit code 2).

    Args:
        run: the function; its other parameters are options as in any command.
        options: names of the settings that there are options for; by default all.
        build: makes ``config`` out of all settings of a training run.
    """
    hints = get_type_hints(run, include_extras=True)
    parameters = [*inspect.signature(run).parameters.values()]
    of_a_run = any(x.name == "recipe" and x.default is x.empty for x in parameters)
    settings = {name: [*settings_of(kind).values()] for name, kind in _configs(hints).items()}
    if of_a_run:
        settings["config"] = train_settings()
    if not settings:
        return run
    for name, group in settings.items():
        settings[name] = [x for x in group if x.option and (options is None or x.name in options)]
    own = [
        x.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[x.name])
        for x in parameters
        if x.name not in {*settings, "recipe"}
    ]

    # Typer takes the annotation of this name for that of an option: none begins with an underscore.
    def command(**_values: Any) -> None:
        arguments = {x.name: _values.pop(x.name) for x in own}
        with usage_errors():
            flags = _flags(_values)
            base = merge_sources(flags | {"run": arguments.get("run")}) if of_a_run else Settings()
        with usage_errors(base.source):
            if of_a_run:
                config = build({**base.flags, **_only(flags, train_settings())})
                arguments |= {"recipe": base.recipe, "config": config}
            for name in settings.keys() - arguments.keys():
                arguments[name] = hints[name](**_only(flags, settings[name]))
        run(**arguments)

    def notes(values: Mapping[str, Any]) -> dict[str, str]:
        with usage_errors():
            base = merge_sources(_flags(values)) if of_a_run else Settings()
        each = [one for group in settings.values() for one in group]
        texts = {one.name: _note(one, base.flags.get(one.name, one.default)) for one in each}
        return texts | ({"recipe": f"default: {base.recipe}"} if of_a_run else {})

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(_sources() if of_a_run else []),
            *own,
            *(option for group in settings.values() for option in _options(group, of_a_run)),
            *([_help_all()] if of_a_run and options is None else []),
        ]
    )
    command.notes = notes  # type: ignore[attr-defined]
    return command


def merge_sources(flags: Mapping[str, Any]) -> Settings:
    """Return every setting as it is without its own flag: recipe < method < run < file.

    Args:
        flags: those of the command line; ``recipe``, ``method``, ``config``, ``resume``, ``run``
            and ``out`` say where settings are from.

    Raises:
        ValueError: one of them names nothing that holds settings.
    """
    files = [read_settings(flags["config"])] if "config" in flags else []
    resume = flags.get("resume") or next(
        (x.flags["resume"] for x in files if "resume" in x.flags), ""
    )
    run = None
    if resume not in _FRESH:
        run = _resumed_run(resume, flags.get("out", ""))
    elif flags.get("run"):
        run = _settings_of_run(Path(flags["run"]))
    base = merge(
        recipe=flags.get("recipe", ""),
        method=flags.get("method", ""),
        files=files if run is None else [run, *files],
    )
    if run is not None and not base.flags["out"]:  # a file that names no folder asks for no other
        return replace(base, flags={**base.flags, "out": run.flags["out"]})
    return base


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
        branch = _settings_of_run(Path(out)).flags
        flags |= {name: branch[name] for name in _OF_A_BRANCH if name in branch}
    return replace(run, flags=flags)


def _settings_of_run(path: Path) -> Settings:
    """Read the config.json of a run, or a checkpoint's own settings where there is none."""
    file = recorded(path)
    if file is not None:
        return read_settings(file, goes_on=True)
    from fastsiam.run import checkpoint

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


def _options(settings: list[Setting], of_a_run: bool) -> Iterator[inspect.Parameter]:
    """Yield the option of each setting, which is None unless it is given."""
    several = len({one.section for one in settings}) > 1
    for one in settings:
        how: dict[str, Any] = {"help": one.help, "is_eager": of_a_run and one.name in _READ_FIRST}
        kind = str if one.kind == int | str else one.kind  # Typer knows no unions
        if one.name in SEVERAL:
            kind = list[str]
        if is_of_a_view(one):
            how["metavar"] = f"{'INTEGER' if kind is int else 'FLOAT'}[,...]"
            kind = str
        if several:
            how["rich_help_panel"] = one.section
        yield _parameter(one.name, kind | None, typer.Option(None, **how))


def _note(one: Setting, value: Any) -> str:
    """Return what ``--help`` says of a setting behind what it is for: default, range of shares."""
    match value:
        case bool():
            text = one.flag if value else f"no-{one.flag}"
        case tuple():
            text = ", ".join(map(str, value))
        case _:
            text = "" if value is None else str(value)
    ends = one.bounds.keys() & {"below", "at_most"}
    return "; ".join(filter(None, [text and f"default: {text}", str(one.bounds) if ends else ""]))


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that stand on the command line, those by ``--set`` too."""
    flags = {name: value for name, value in values.items() if value not in (None, [])}
    for first, others in SEVERAL.items():
        if first in flags:
            flags[first], *flags[others] = flags[first]
    return parse_assignments(flags.pop("assignments", ())) | flags


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )


def _only(flags: Mapping[str, Any], settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the flags of some settings."""
    return {one.name: flags[one.name] for one in settings if one.name in flags}


def _configs(hints: Mapping[str, Any]) -> dict[str, type[Config]]:
    """Return the parameters that are groups of settings."""
    return {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and issubclass(kind, Config)
    }
