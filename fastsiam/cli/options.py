"""Commands whose options are made from settings.

An option that is not given is None; its setting then has the value of another source (see
``merge_sources``). Typer reads options from a function's ``__signature__`` (PEP 362), which
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
from typing import Any, Literal, get_args, get_origin

import typer
import typer.core
from typer.models import ArgumentInfo

from fastsiam.config.files import (
    Settings,
    merge,
    parse_assignments,
    read_settings,
    run_folder,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.config.run import RunConfig
from fastsiam.config.setting import Config, Setting, as_text, settings_of, title
from fastsiam.config.train import BRANCH_SETTINGS, TrainConfig, all_settings, train_settings
from fastsiam.config.views import ViewConfig
from fastsiam.files import require_local

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
        are named before ``--help``. A setting that several methods have is described as that
        method's, or once for each method if it has none of that name.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        of_a_run: set[str] = set()
        if self._takes("assignments"):
            in_sections = {x.name for x in self.params if getattr(x, "rich_help_panel", None)}
            of_a_run = in_sections & train_settings().keys()
            with usage_errors():
                defaults = merge_sources({k: v for k, v in ctx.params.items() if v}).flags
            is_short = self._takes("help_all") and _HELP_ALL not in ctx.meta
            for one in all_settings(defaults["method"]):
                if one.name in of_a_run and (one.name in _COMMON or not is_short):
                    record = _usage(one), _help(one, defaults.get(one.name, one.default))
                    sections.setdefault(one.section, []).append(record)
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row and parameter.name not in of_a_run:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                section = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(section, []).append(row)
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
    groups: dict[str, type[Config]] = {
        name: x.annotation
        for name, x in own.items()
        if isinstance(x.annotation, type) and issubclass(x.annotation, Config)
    }
    own = {name: x for name, x in own.items() if name not in groups}
    inputs = [name for name, x in own.items() if ArgumentInfo in map(type, get_args(x.annotation))]

    def command(**_values: Any) -> None:
        arguments = {name: _values.pop(name) for name in own}
        for name in inputs:
            value = arguments[name]
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    require_local(path, reads=True)
        flags = {name: value for name, value in _values.items() if value not in (None, [])}
        merged = Settings()
        if of_a_run:
            with usage_errors():
                flags = parse_assignments(flags.pop("assignments", ())) | flags
                if isinstance(flags.get("data"), list):
                    flags["data"], *others = flags["data"]
                    flags["mixed_with"] = others or flags.get("mixed_with", [])
                merged = merge_sources(flags)
        with usage_errors(merged.source):
            if of_a_run:
                arguments |= {"recipe": merged.recipe, "config": build(merged.flags)}
            arguments |= {name: group.from_flags(flags) for name, group in groups.items()}
        with usage_errors():
            for one in arguments.values():
                if isinstance(one, Config):
                    one.check_given(flags)
        run(**arguments)

    settings = [settings_of(group) for group in groups.values()]
    declared = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in own.values()]
    if of_a_run:
        settings.insert(0, train_settings())
        declared = [*(_SOURCES if options is None else _SOURCES[:-1]), *declared]
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


def _parameter(name: str, kind: Any, *flags: str, **option: Any) -> inspect.Parameter:
    """Return an option that is None unless it is given."""
    keyword, default = inspect.Parameter.KEYWORD_ONLY, typer.Option(None, *flags, **option)
    return inspect.Parameter(name, keyword, default=default, annotation=kind | None)


_SOURCES = (
    _parameter(
        "recipe",
        str,
        is_eager=True,
        help=f"Named starting point: {', '.join(RECIPES)}.  [default: {next(iter(RECIPES))}]",
    ),
    _parameter(
        "config",
        Path,
        is_eager=True,
        help="Settings: a TOML or YAML file as fastsiam config prints it, or a run. They override "
        "the recipe's; options override them.",
    ),
    _parameter(
        "assignments",
        list[str],
        "--set",
        metavar="NAME=VALUE",
        help="Any setting that fastsiam config lists, such as lr_end=0.001; may be repeated.",
    ),
    _parameter(
        "help_all",
        bool,
        "--help-all",
        is_eager=True,
        callback=_show_all,
        help="Show all options and exit.",
    ),
)
"""The options that say where settings are from, and the one that shows all options."""


def _option(one: Setting, *, repeats: bool) -> inspect.Parameter:
    """Return the option of a setting: text, which the setting's ``Config`` converts and checks."""
    is_switch = one.kind in (bool, bool | None)
    return _parameter(
        one.name,
        bool if is_switch else list[str] if one.name == "data" and repeats else str,
        is_eager=repeats and one.name == "method",
        help=_help(one, one.default),
        metavar=None if is_switch else _metavar(one.kind),
        rich_help_panel=one.section,
    )


def _usage(one: Setting) -> str:
    """Return an option and what it takes; of a setting of the views, one value or several."""
    if one.kind is bool:
        return f"--{one.flag} / --no-{one.flag}"
    several = "[,...]" if one is settings_of(ViewConfig).get(one.name) else ""
    return f"--{one.flag} {_metavar(one.kind)}{several}"


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
    """Return every setting: those of the recipe, the resumed run, the file, the command line.

    Each overrides the ones before.

    Args:
        flags: those of the command line, with ``recipe`` and ``config``, the settings file.

    Raises:
        ValueError: one of them names nothing that holds settings.
    """
    sources, recipe = [Settings(flags=flags)], str(flags.get("recipe", ""))
    if "config" in flags:
        sources.insert(0, read_settings(Path(flags["config"])))
    resume = next((x for own in sources[::-1] if (x := str(own.flags.get("resume", "")))), "")
    if resume in _FRESH:
        return merge(*sources, recipe=recipe)
    run = _resumed_run(resume, str(flags.get("out", "")))
    merged = merge(run, *sources, recipe=recipe)  # a file that names no folder leaves the run's
    flags = {**merged.flags, "out": merged.flags["out"] or run.flags["out"]}
    return replace(merged, flags=flags, recipe=run.recipe or merged.recipe)


def settings_of_resumed(run: RunConfig) -> Mapping[str, Any] | None:
    """Return the settings that ``--resume RUN`` alone gives a run; None if it names no run."""
    if run.resume in _FRESH:
        return None
    return merge_sources({"resume": run.resume, "out": run.out}).flags


def _resumed_run(path: str, out: str) -> Settings:
    """Return the settings of a run that is resumed, in its own folder or in that of a branch.

    A branch that has started has its own settings of the optimizer.
    """
    run, folder = _settings_of_run(Path(path)), run_folder(Path(path))
    flags = {**run.flags, "resume": path, "out": "" if folder is None else str(folder)}
    if out and (folder is None or Path(out).resolve() != folder.resolve()):
        flags["extend"] = 0  # the run's epochs are those that it was extended to
    if out and (Path(out) / "config.json").is_file():
        branch = _settings_of_run(Path(out)).flags
        flags |= {name: branch[name] for name in _OF_A_BRANCH if name in branch}
    return replace(run, flags=flags)


def _settings_of_run(path: Path) -> Settings:
    """Read the config.json of a run, or the settings in a checkpoint if that file is missing."""
    for folder in (run_folder(path), path.parent):
        if folder is not None and (folder / "config.json").is_file():
            return read_settings(folder, resumes=True)
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
