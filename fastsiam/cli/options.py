"""Commands whose options are generated from settings.

An option that is not passed is None; its setting then gets its value from another source (see
``merge_sources``). Typer reads the options from a function's ``__signature__`` (PEP 362), which
``_with_options`` sets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
import typer.core
from typer.models import ArgumentInfo

from fastsiam.config.recipes import RECIPES
from fastsiam.config.run import RunConfig
from fastsiam.config.setting import Config, Setting, as_text, settings_of, title
from fastsiam.config.settings_files import (
    Settings,
    merge,
    parse_assignments,
    read_settings,
    run_folder,
)
from fastsiam.config.train import BRANCH_SETTINGS, all_settings, train_settings
from fastsiam.config.views import ViewConfig
from fastsiam.errors import FastSiamError
from fastsiam.files import is_file, os_errors_as, require_local

_FRESH = "auto", "never", ""
"""Values of ``--resume`` that are not the path of a run."""
_BRANCH_OPTIONS = *BRANCH_SETTINGS, "extend"
"""Settings in which a branch may differ from its original run."""
_COMMON = {
    "data", "pipeline", "workers", "bad_images", "crop", "backbone", "method", "epochs", "batch",
    "lr", "accumulate", "seed", "precision", "compile", "knn_every", "device", "gpus", "nodes",
    "rendezvous", "max_restarts", "out", "init", "resume", "tracker", "save_every",
}  # fmt: skip
"""Settings that ``--help`` of ``train`` and ``config`` shows; ``--help-all`` shows all."""
_HELP_ALL = "fastsiam.help_all"


class Command(typer.core.TyperCommand):
    """A command whose help is plain text, with the options in sections."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the options; suggest ``--set`` for a setting that has no option."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # versions of Typer differ in the class for unknown options
            option = getattr(error, "option_name", "")
            name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
            known = {x for one in self.params for x in (one.name, *one.opts, *one.secondary_opts)}
            if name in train_settings() and "assignments" in known and option not in known:
                error.message = f"No such option: {option}; pass --set {name}=VALUE"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options without a section, and the sections.

        The defaults shown for a training run are those of the recipe, method and file passed before
        ``--help``. A setting that several methods share is described for the selected method, or
        once per method if the selected method does not have it.
        """
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        parameters: dict[str, Any] = {one.name: one for one in self.get_params(ctx)}
        headings = {x: getattr(y, "rich_help_panel", None) for x, y in parameters.items()}
        of_a_run: set[str] = set()
        if "assignments" in parameters:
            with usage_errors():
                defaults = merge_sources({k: v for k, v in ctx.params.items() if v}).flags
            is_short = "help_all" in parameters and _HELP_ALL not in ctx.meta
            of_a_run = {x for x in train_settings() if headings.get(x)}
            for one in all_settings(defaults["method"]):
                if one.name in of_a_run and (one.name in _COMMON or not is_short):
                    option = parameters[one.name]
                    option.help = _help(one, defaults.get(one.name, one.default))
                    option.metavar = _metavar(one)
                    sections.setdefault(one.section, []).append(option.get_help_record(ctx))
        for name, parameter in parameters.items():
            if name not in of_a_run and (record := parameter.get_help_record(ctx)):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(headings[name] or kind, []).append(record)
        for name, records in sections.items():
            if records:
                formatter.write_paragraph()
                formatter.write(f"{name}\n" if ": " in name else f"{name}:\n")
                formatter.indent()
                formatter.write_dl(records)
                formatter.dedent()


class Commands(typer.Typer):
    """A Typer app whose commands can take settings; their summaries are not truncated."""

    def __init__(self, *, help: str = "", **others: Any) -> None:
        super().__init__(help=help, short_help=help, **others)

    def command(  # type: ignore[override]
        self,
        name: str | None = None,
        *,
        options: Collection[str] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate a function as a command, with an option for each setting that it takes.

        A parameter of a ``Config`` type takes the settings of that class. A command with a
        parameter ``recipe`` takes all settings of a training run. Those not passed as options come
        from recipe, method, run and file. An invalid value is a usage error (exit code 2).

        Only settings named in ``options`` get an option; default: all.
        """

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            command = _with_options(run, options)
            super(Commands, self).command(name, cls=Command, short_help=f"{title(run)}.")(command)
            return run

        return decorate


def _with_options(run: Callable[..., None], options: Collection[str] | None) -> Callable[..., None]:
    """Wrap a function so that Typer finds an option for each setting that it takes."""
    parameters = dict(inspect.signature(run, eval_str=True).parameters)
    of_a_run = parameters.pop("recipe", None) is not None
    declared: list[inspect.Parameter] = []
    if of_a_run:
        declared += _SOURCES if options is None else _SOURCES[:-1]
    settings = train_settings() if of_a_run else {}
    groups: dict[str, type[Config]] = {}
    for name, parameter in parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, Config):
            groups[name] = kind
            settings = settings | settings_of(kind)
        else:
            declared.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    inputs = [one.name for one in declared if ArgumentInfo in map(type, get_args(one.annotation))]
    for one in settings.values():
        if one.option and (options is None or one.name in options):
            declared.append(_option(one, of_a_run=of_a_run))

    def command(**values: Any) -> None:
        arguments = {name: values.pop(name) for name in parameters if name not in groups}
        for name in inputs:
            value = arguments[name]
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path):
                    require_local(path, reads=True)
        with usage_errors():
            flags = _flags(values)
            merged = merge_sources(flags) if of_a_run else Settings(flags=flags)
        with usage_errors(merged.source):
            configs = {name: group.from_flags(merged.flags) for name, group in groups.items()}
        with usage_errors():
            for config in configs.values():
                config.check_given(flags)
        run(**arguments, **configs, **({"recipe": merged.recipe} if of_a_run else {}))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    command.__annotations__ = {}  # older versions of Typer would mistake "values" for an option
    return command


def _flags(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings passed as options, including ``--set`` and repeated ``--data``."""
    flags = {name: value for name, value in options.items() if value not in (None, [])}
    flags = parse_assignments(flags.pop("assignments", ())) | flags
    if isinstance(flags.get("data"), list):
        flags["data"], *more_data = flags["data"]
        flags["mixed_with"] = more_data or flags.get("mixed_with", [])
        if not flags["mixed_with"]:  # a file or a run may have a mixture's weights
            flags.setdefault("weights", [])
    return flags


def _show_all(context: typer.Context, is_given: bool | None) -> None:
    if is_given:
        context.meta[_HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _parameter(name: str, kind: Any, *declarations: str, **options: Any) -> inspect.Parameter:
    """Return the function parameter of an option, which is None unless it is passed."""
    option = typer.Option(None, *declarations, **options)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=option, annotation=kind | None)


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
        help="Settings file (TOML or YAML, as printed by fastsiam config) or run. Its settings "
        "override the recipe's; options override both.",
    ),
    _parameter(
        "assignments",
        list[str],
        "--set",
        metavar="NAME=VALUE",
        help="Any setting listed by fastsiam config, such as lr_end=0.001. May be repeated.",
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
"""The options for the sources of settings, and ``--help-all``."""


def _option(one: Setting, *, of_a_run: bool) -> inspect.Parameter:
    """Return the option of a setting. Its ``Config`` converts and checks the text."""
    metavar = _metavar(one)
    return _parameter(
        one.name,
        bool if metavar is None else list[str] if of_a_run and one.name == "data" else str,
        is_eager=of_a_run and one.name == "method",
        help=_help(one, one.default),
        metavar=metavar,
        rich_help_panel=one.section,
    )


def _help(one: Setting, default: Any) -> str:
    """Return an option's help with its default, and its range if that ends at 100 or less."""
    text = as_text(default)
    if isinstance(default, bool):
        text = one.flag if default else f"no-{one.flag}"
    is_described = "Default: " in one.help and default == one.default
    notes = [] if default in (None, "", ()) or is_described else [f"default: {text}"]
    if min(one.bounds.get("below", inf), one.bounds.get("at_most", inf)) <= 100:
        notes.append(one.range)
    return f"{one.help}  [{'; '.join(notes)}]" if notes else one.help


def _metavar(one: Setting) -> str | None:
    """Return the metavar, such as ``INTEGER`` (per view: ``INTEGER[,...]``); None for a flag."""
    if one.kind in (bool, bool | None):
        return None
    suffix = "[,...]" if one is settings_of(ViewConfig).get(one.name) else ""
    return _value_name(one.kind) + suffix


def _value_name(kind: Any) -> str:
    items = get_args(kind)
    if get_origin(kind) is Literal:
        return f"[{'|'.join(filter(None, map(str, items)))}]"
    if get_origin(kind) is tuple:
        return f"{_value_name(items[0])},..."
    if items:
        return "|".join(_value_name(one) for one in items if one is not NoneType)
    return {int: "INTEGER", float: "FLOAT"}.get(kind, "TEXT")


def merge_sources(flags: Mapping[str, Any]) -> Settings:
    """Merge the settings of the recipe, the resumed run, the settings file and the command line.

    Each source overrides the previous ones. The last one, ``flags``, has ``recipe`` and ``config``.

    Raises:
        ValueError: the recipe is unknown, or the file is not a valid settings file.
    """
    file = read_settings(Path(flags["config"])) if "config" in flags else Settings()
    options, recipe = Settings(flags=flags), str(flags.get("recipe", ""))
    resume = str(flags.get("resume") or file.flags.get("resume", ""))
    if resume in _FRESH:
        return merge(file, options, recipe=recipe)
    run = _resumed_run(resume, str(flags.get("out") or file.flags.get("out", "")))
    merged = merge(run, file, options, recipe=recipe)
    given = {**file.flags, **flags}
    flags = {**merged.flags, "out": merged.flags["out"] or run.flags["out"]}  # a file may set ""
    extend = train_settings()["extend"].convert_value(flags["extend"])
    if "epochs" not in given and 0 < extend < run.flags["extend"]:
        flags["epochs"] = extend  # the run may not have saved a checkpoint since it was extended
    return replace(merged, flags=flags, recipe=run.recipe or merged.recipe)


def settings_of_resumed(run: RunConfig) -> Mapping[str, Any] | None:
    """Return the settings that ``--resume RUN`` alone implies; None if it is not a run's path."""
    if run.resume in _FRESH:
        return None
    return merge_sources({"resume": run.resume, "out": run.out}).flags


def _resumed_run(path: str, out: str) -> Settings:
    """Return the settings of a resumed run, in its own folder or in the folder of a branch.

    A branch that has a checkpoint keeps its own optimizer settings.
    """
    from fastsiam.run import checkpoint

    folder = run_folder(Path(path))
    if folder is not None and _has_settings(folder):
        run = read_settings(folder, resumes=True)
    else:
        run = Settings(source=path, flags=checkpoint.load(Path(path)).config.to_flags())
    flags = {**run.flags, "resume": path, "out": "" if folder is None else str(folder)}
    if folder is None or (out and Path(out).resolve() != folder.resolve()):
        flags["extend"] = 0  # the run's epochs already include its extension
    if out and _has_settings(Path(out)) and checkpoint.exists(Path(out)):
        branch = read_settings(Path(out), resumes=True).flags
        flags |= {name: branch[name] for name in _BRANCH_OPTIONS if name in branch}
    return replace(run, flags=flags)


def _has_settings(run: Path) -> bool:
    with os_errors_as(FastSiamError, f"cannot read {run}"):
        exists = is_file(run / "config.json")
    return exists


@contextlib.contextmanager
def usage_errors(source: str = "") -> Iterator[None]:
    """Turn a ``ValueError`` into a usage error that names the source of the settings."""
    try:
        yield
    except ValueError as error:
        suffix = f" (with the settings of {source})" if source else ""
        raise typer.BadParameter(f"{error}{suffix}") from error
