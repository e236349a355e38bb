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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from fastsiam.cli.help import Command, show_all
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
from fastsiam.config.setting import Config, Setting, settings_of, title

_FRESH = "auto", "never", ""
"""Values of ``--resume`` that name no run."""
_OF_A_BRANCH = *BRANCH_SETTINGS, "restarts", "extend", "extend_schedule"
"""Settings in which a branch may differ from the run that it branched off."""
_READ_FIRST = "method", "resume"
"""Options that ``--help`` behind them shows the defaults of."""


class Commands(typer.Typer):
    """A Typer app whose commands may take settings, and are listed with a whole sentence each."""

    def __init__(self, *, help: str = "", **how: Any) -> None:
        super().__init__(help=help, short_help=help, **how)

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
            super(Commands, self).command(name, cls=Command, short_help=f"{title(run)}.")(command)
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
    parameters = inspect.signature(run, eval_str=True).parameters
    of_a_run = "recipe" in parameters and parameters["recipe"].default is inspect.Parameter.empty
    groups = {name: x.annotation for name, x in parameters.items() if _is_config(x.annotation)}
    if of_a_run:
        groups.pop("config", None)
    each = [train_settings()] if of_a_run else []
    each += [settings_of(kind) for kind in groups.values()]
    if not each:
        return run
    shown = [
        [x for x in group.values() if x.option and (options is None or x.name in options)]
        for group in each
    ]
    own = [
        x.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, x in parameters.items()
        if name not in groups and not (of_a_run and name in ("recipe", "config"))
    ]

    # Typer takes the annotation of this name for that of an option: none begins with an underscore.
    def command(**_values: Any) -> None:
        arguments = {x.name: _values.pop(x.name) for x in own}
        with usage_errors():
            flags = _flags(_values)
            base = merge_sources(flags | {"run": arguments.get("run")}) if of_a_run else Settings()
        with usage_errors(base.source):
            if of_a_run:
                arguments |= {"recipe": base.recipe, "config": build({**base.flags, **flags})}
            for name, kind in groups.items():
                given = flags.keys() & settings_of(kind).keys()
                arguments[name] = kind(**{setting: flags[setting] for setting in given})
        run(**arguments)

    def notes(values: Mapping[str, Any]) -> dict[str, str]:
        with usage_errors():
            base = merge_sources(_flags(values)) if of_a_run else Settings()
        texts = {x.name: _note(x, base.flags.get(x.name, x.default)) for x in chain(*shown)}
        return texts | ({"recipe": f"default: {base.recipe}"} if of_a_run else {})

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    *from_files, help_all = inspect.signature(_sources, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(from_files if of_a_run else []),
            *own,
            *(_option(one, group, of_a_run=of_a_run) for group in shown for one in group),
            *([help_all] if of_a_run and options is None else []),
        ]
    )
    command.notes = notes  # type: ignore[attr-defined]
    return command


def _sources(
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            help=f"Named starting point: {', '.join(RECIPES)}. Flags change single settings of it.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            help="Settings: a TOML or YAML file, or a run, whose config.json is read. They beat "
            "the recipe's; flags beat them. fastsiam config writes such a file.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            is_eager=True,
            metavar="NAME=VALUE",
            help="A setting, as in a settings file, such as lr_end=0.001; may be given several "
            "times. Some settings have no flag of their own; fastsiam config lists all.",
        ),
    ] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=show_all, help="Show all options and exit."
        ),
    ] = False,
) -> None:
    """Declare the options that say where settings are from, and the one that shows all options."""


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that stand on the command line, those by ``--set`` too."""
    flags = {name: value for name, value in values.items() if value not in (None, [])}
    for first, others in SEVERAL.items():
        if isinstance(flags.get(first), list):
            flags[first], *flags[others] = flags[first]
    return parse_assignments(flags.pop("assignments", ())) | flags


def merge_sources(flags: Mapping[str, Any]) -> Settings:
    """Return every setting as it is without its own flag: recipe < method < run < file.

    Args:
        flags: those of the command line; ``recipe``, ``method``, ``config``, ``resume``, ``run``
            and ``out`` say where settings are from.

    Raises:
        ValueError: one of them names nothing that holds settings.
    """
    files = [read_settings(flags["config"])] if "config" in flags else []
    resume = flags.get("resume") or "".join(str(x.flags.get("resume", "")) for x in files)
    run = None
    if resume not in _FRESH:
        run = _resumed_run(resume, str(flags.get("out", "")))
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


def _resumed_run(path: str, out: str) -> Settings:
    """Return the settings of a run that is resumed, in its own folder or in a branch's.

    A branch that has begun has settings of the optimizer of its own.
    """
    run, folder = _settings_of_run(Path(path)), run_folder(Path(path))
    flags = {**run.flags, "resume": path, "out": "" if folder is None else str(folder)}
    if out and (Path(out) / "config.json").is_file():
        branch = _settings_of_run(Path(out)).flags
        flags |= {name: branch[name] for name in _OF_A_BRANCH if name in branch}
    return replace(run, flags=flags)


def _settings_of_run(path: Path) -> Settings:
    """Read the config.json of a run, or the settings in a checkpoint if that file is missing."""
    file = recorded(path)
    if file is not None:
        return read_settings(file, goes_on=True)
    from fastsiam.run import checkpoint

    return Settings(source=str(path), flags=to_flags(checkpoint.load(path).config))


@contextlib.contextmanager
def usage_errors(source: str = "") -> Iterator[None]:
    """Turn a ``ValueError`` inside into a usage error, with where settings are from."""
    try:
        yield
    except ValueError as error:
        where = f" (with the settings of {source})" if source else ""
        raise typer.BadParameter(f"{error}{where}") from error


def _option(one: Setting, group: list[Setting], *, of_a_run: bool) -> inspect.Parameter:
    """Return the option of a setting, which is None unless it is given."""
    kind: Any = str if one.kind == int | str else one.kind  # Typer knows no unions
    metavar = None
    if of_a_run and one.name in SEVERAL:
        kind = list[str]
    if is_of_a_view(one):
        kind, metavar = str, f"{'INTEGER' if kind is int else 'FLOAT'}[,...]"
    option = typer.Option(
        None,
        help=one.help,
        is_eager=of_a_run and one.name in _READ_FIRST,
        metavar=metavar,
        rich_help_panel=one.section if len({x.section for x in group}) > 1 else None,
    )
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None
    )


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


def _is_config(kind: Any) -> bool:
    """Tell whether a parameter is a group of settings."""
    return isinstance(kind, type) and issubclass(kind, Config)
