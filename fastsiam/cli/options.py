"""Commands whose options are made from settings.

An option that is not given is None; its setting then has the value of the other sources, which
``merge_sources`` merges. Typer reads options from a function's ``__signature__`` (PEP 362), which
``_with_options`` sets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import typer.core

from fastsiam.config.files import (
    Settings,
    merge,
    parse_assignments,
    read_settings,
    recorded,
    run_folder,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Config, Setting, as_text, settings_of, title
from fastsiam.config.train import BRANCH_SETTINGS, TrainConfig, train_settings

_FRESH = "auto", "never", ""
"""Values of ``--resume`` that name no run."""
_OF_A_BRANCH = *BRANCH_SETTINGS, "extend"
"""Settings in which a branch may differ from the run that it branched off."""
_COMMON = {
    "data", "pipeline", "workers", "bad_images", "crop", "backbone", "method", "epochs", "batch",
    "lr", "accumulate", "seed", "precision", "compile", "knn_every", "device", "gpus", "nodes",
    "rendezvous", "max_restarts", "out", "init", "resume", "tracker", "save_every",
}  # fmt: skip
"""Settings that ``--help`` of ``train`` and ``config`` shows; ``--help-all`` shows all."""
_HELP_ALL = "fastsiam.help_all"


class Command(typer.core.TyperCommand):
    """A command whose help is plain text, with the options in sections."""

    def _takes(self, name: str) -> bool:
        return any(parameter.name == name for parameter in self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; point out ``--set`` for a setting that has no option."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # versions of Typer differ in the class for unknown options
            option = getattr(error, "option_name", "")
            name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
            if self._takes("assignments") and name in train_settings():
                error.message = f"No such option: {option}; pass --set {name}=VALUE"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options without a section, and the sections.

        Settings of a training run have the defaults of the recipe, the method and the file that
        are named before ``--help``.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        settings: Mapping[str, Setting] = {}
        defaults: Mapping[str, Any] = {}
        if self._takes("assignments"):
            with usage_errors():
                defaults = merge_sources({k: v for k, v in ctx.params.items() if v}).flags
            settings = train_settings()
        is_short = self._takes("help_all") and _HELP_ALL not in ctx.meta
        for parameter in self.get_params(ctx):
            section = getattr(parameter, "rich_help_panel", None)
            record = parameter.get_help_record(ctx)
            if record is None or (is_short and section and parameter.name not in _COMMON):
                continue
            if section and (one := settings.get(parameter.name)):
                record = record[0], _help(one, defaults.get(one.name, one.default))
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(section or kind, []).append(record)
        for name, records in sections.items():
            if records:
                formatter.write_paragraph()
                formatter.write(f"{name}\n" if ": " in name else f"{name}:\n")
                formatter.indent()
                formatter.write_dl(records)
                formatter.dedent()


class Commands(typer.Typer):
    """A Typer app whose commands may take settings, and are listed with a whole sentence each."""

    def __init__(self, *, help: str = "", **others: Any) -> None:
        super().__init__(help=help, short_help=help, **others)

    def command(  # type: ignore[override]
        self,
        name: str | None = None,
        *,
        options: Collection[str] | None = None,
        build: Callable[[Mapping[str, Any]], Any] = TrainConfig.from_flags,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator of a command, with an option for each setting that it takes.

        A parameter that is a ``Config`` has the settings of that class. A command with a parameter
        ``recipe`` takes the settings of a training run as ``config``, which come from recipe,
        method, run and file where no option gives them. A value that is not allowed is a usage
        error (exit code 2).

        Args:
            name: of the command; by default that of the function.
            options: names of the settings that get an option; by default all.
            build: makes ``config`` out of all settings of a training run.
        """

        def added(run: Callable[..., Any]) -> Callable[..., Any]:
            command = _with_options(run, options, build)
            super(Commands, self).command(name, cls=Command, short_help=f"{title(run)}.")(command)
            return run

        return added


def _with_options(
    run: Callable[..., None],
    options: Collection[str] | None,
    build: Callable[[Mapping[str, Any]], Any],
) -> Callable[..., None]:
    """Return a function with Typer's options for the settings that another function takes."""
    parameters = inspect.signature(run, eval_str=True).parameters
    of_a_run = "recipe" in parameters
    own = {x: y for x, y in parameters.items() if not (of_a_run and x in ("recipe", "config"))}
    groups = {
        name: settings_of(x.annotation)
        for name, x in own.items()
        if isinstance(x.annotation, type) and issubclass(x.annotation, Config)
    }
    own = {name: x for name, x in own.items() if name not in groups}

    def command(**_values: Any) -> None:
        arguments = {name: _values.pop(name) for name in own}
        flags = {name: value for name, value in _values.items() if value not in (None, [])}
        base = Settings()
        if of_a_run:
            with usage_errors():
                flags = parse_assignments(flags.pop("assignments", ())) | flags
                if isinstance(flags.get("data"), list):
                    flags["data"], *flags["mixed_with"] = flags["data"]
                base = merge_sources(flags)
        with usage_errors(base.source):
            if of_a_run:
                arguments |= {"recipe": base.recipe, "config": build({**base.flags, **flags})}
            for name, group in groups.items():
                given = {setting: flags[setting] for setting in group if setting in flags}
                arguments[name] = parameters[name].annotation(**given)
        run(**arguments)

    settings = [*groups.values()]
    declared = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in own.values()]
    if of_a_run:
        settings.insert(0, train_settings())
        *sources, help_all = inspect.signature(_sources, eval_str=True).parameters.values()
        declared = [*sources, *([help_all] if options is None else []), *declared]
    for one in chain(*(group.values() for group in settings)):
        if one.option and (options is None or one.name in options):
            declared.append(_option(one, repeats=of_a_run))
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    return command


def _show_all(context: typer.Context, is_given: bool | None) -> None:
    if is_given:
        context.meta[_HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _sources(
    *,
    recipe: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            help=f"Named starting point: {', '.join(RECIPES)}.  [default: {next(iter(RECIPES))}]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            help="Settings: a TOML or YAML file as fastsiam config prints it, or a run. They "
            "override the recipe's; options override them.",
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any setting that fastsiam config lists, such as lr_end=0.001; may be repeated.",
        ),
    ] = None,
    help_all: Annotated[
        bool | None,
        typer.Option(
            "--help-all", is_eager=True, callback=_show_all, help="Show all options and exit."
        ),
    ] = None,
) -> None:
    """Declare the options that say where settings are from, and the one that shows all options."""


def _option(one: Setting, *, repeats: bool) -> inspect.Parameter:
    """Return the option of a setting, which is None unless it is given.

    Its value stays text, which the setting's ``Config`` converts and checks.
    """
    kind: Any = bool if one.kind in (bool, bool | None) else str
    if one.name == "data" and repeats:
        kind = list[str]
    option = typer.Option(
        None,
        is_eager=repeats and one.name == "method",
        help=_help(one, one.default),
        metavar=None if kind is bool else _metavar(one.kind),
        rich_help_panel=one.section,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, keyword, default=option, annotation=kind | None)


def _help(one: Setting, default: Any) -> str:
    """Return the help of an option, with its default, and the range of a share or percentage."""
    text = as_text(default)
    if isinstance(default, bool):
        text = one.flag if default else f"no-{one.flag}"
    notes = [] if default in (None, "", ()) else [f"default: {text}"]
    if min(one.bounds.get("below", inf), one.bounds.get("at_most", inf)) <= 100:
        notes.append(one.range)
    return f"{one.help}  [{'; '.join(notes)}]" if notes else one.help


def _metavar(kind: Any) -> str:
    """Return what the help shows as the value of an option."""
    items = get_args(kind)
    if get_origin(kind) is Literal:
        return f"[{'|'.join(filter(None, items))}]"
    if get_origin(kind) is tuple:
        return f"{_metavar(items[0])},..."
    if items:
        return "|".join(_metavar(one) for one in items if one is not NoneType)
    return {int: "INTEGER", float: "FLOAT"}.get(kind, "TEXT")


def merge_sources(flags: Mapping[str, Any]) -> Settings:
    """Return every setting as it is without its own option: recipe < method < run < file.

    Args:
        flags: those of the command line; ``recipe``, ``method``, ``config``, ``resume`` and
            ``out`` say where settings are from.

    Raises:
        ValueError: one of them names nothing that holds settings.
    """
    files = [read_settings(Path(flags["config"]))] if "config" in flags else []
    resume = flags.get("resume") or "".join(str(x.flags.get("resume", "")) for x in files)
    run = None
    if resume not in _FRESH:
        run = _resumed_run(resume, str(flags.get("out", "")))
    base = merge(
        recipe=flags.get("recipe", ""),
        method=flags.get("method", ""),
        files=files if run is None else [run, *files],
    )
    if run is not None and not base.flags["out"]:  # the file asks for no other folder
        return replace(base, flags={**base.flags, "out": run.flags["out"]})
    return base


def _resumed_run(path: str, out: str) -> Settings:
    """Return the settings of a run that is resumed, in its own folder or in that of a branch.

    A branch that has started has its own settings of the optimizer.
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
        return read_settings(file, resumes=True)
    from fastsiam.run import checkpoint

    return Settings(source=str(path), flags=checkpoint.load(path).config.to_flags())


@contextlib.contextmanager
def usage_errors(source: str = "") -> Iterator[None]:
    """Turn a ``ValueError`` inside into a usage error, with the source of the settings."""
    try:
        yield
    except ValueError as error:
        where = f" (with the settings of {source})" if source else ""
        raise typer.BadParameter(f"{error}{where}") from error
