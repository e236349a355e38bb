"""``--help`` as plain text: options in sections, and summaries in full; refusals of values.

Typer keeps an option's section in its ``rich_help_panel``, which only its Rich output draws.
"""

from __future__ import annotations

import re
from typing import Any

import typer
import typer.core

from fastsiam.config.checks import or_nearest
from fastsiam.config.flags import train_settings

COMMON = frozenset({
    "data", "pipeline", "workers", "bad_images", "crop", "backbone", "method", "epochs", "batch",
    "lr", "accumulate", "seed", "precision", "compile", "knn_every", "device", "gpus", "nodes",
    "rendezvous", "max_restarts", "out", "init", "resume", "tracker", "save_every",
})  # fmt: skip
"""Settings that ``--help`` shows of the commands that take all of them; ``--help-all`` has all."""
_ALL = "fastsiam.help_all"
_WHOLE = 1000
"""More characters than the first sentence of any command's help."""


class Command(typer.core.TyperCommand):
    """A command whose options are listed by section, in the order in which they come."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options; a value that is refused is named, with the nearest that there is."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _refusal(error)
            raise
        except Exception as error:  # of an unknown option: no class that all versions of Typer name
            option = getattr(error, "option_name", "")
            name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
            if self._takes_settings() and name in {one.name for one in train_settings()}:
                error.message = f"No such option: {option}; add --set {name}=VALUE"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options of no section, and then the sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        notes = getattr(self.callback, "notes", dict)(ctx.params)
        for parameter in self.get_params(ctx):
            if self._is_left_out(parameter, ctx):
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            name = getattr(parameter, "rich_help_panel", None) or kind
            if record := parameter.get_help_record(ctx):
                option, text = record
                if note := notes.get(parameter.name):
                    text = f"{text}  [{note}]"
                sections.setdefault(name, []).append((option, text))
        for name, records in sections.items():
            if records:
                formatter.write_paragraph()
                formatter.write(f"{name}\n" if " " in name else f"{name}:\n")
                formatter.indent()
                formatter.write_dl(records)
                formatter.dedent()

    def _is_left_out(self, parameter: Any, ctx: Any) -> bool:
        """Tell whether ``--help`` leaves an option to ``--help-all``."""
        of_settings = getattr(parameter, "rich_help_panel", None) is not None
        has_both = any(other.name == "help_all" for other in self.params)
        return has_both and of_settings and parameter.name not in COMMON and _ALL not in ctx.meta

    def _takes_settings(self) -> bool:
        return any(parameter.name == "assignments" for parameter in self.params)


def show_all(context: typer.Context, asked: bool) -> None:
    """Print the help with all options and exit: the callback of ``--help-all``."""
    if asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _refusal(error: typer.BadParameter) -> str:
    """Return Typer's message in the words of ours: some versions let pydantic write it."""
    message = error.message.removeprefix("Value error, ")
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if found and message.startswith("Input should"):
        message = f"{found[0]['input']!r} {message.removeprefix('Input ')}"
    given, one_of, choices = message.partition(" is not one of ")
    if not one_of:
        return message
    return or_nearest(message.rstrip("."), given.strip("'"), re.findall("'(.*?)'", choices))


class Group(typer.core.TyperGroup):
    """Commands with the first sentence of each one's help, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        rows = [
            (name, command.get_short_help_str(_WHOLE))
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
