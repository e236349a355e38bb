"""``--help`` as plain text with options in sections; values that are refused.

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
            if name in train_settings() and self._takes("assignments"):
                error.message = f"No such option: {option}; add --set {name}=VALUE"  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options of no section, and then the sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        notes = getattr(self.callback, "notes", dict)(ctx.params)
        is_short = self._takes("help_all") and _ALL not in ctx.meta
        for parameter in self.get_params(ctx):
            section = getattr(parameter, "rich_help_panel", None)
            record = parameter.get_help_record(ctx)
            if record is None or (is_short and section and parameter.name not in COMMON):
                continue
            if note := notes.get(parameter.name):
                record = record[0], f"{record[1]}  [{note}]"
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(section or kind, []).append(record)
        for name, records in sections.items():
            if records:
                formatter.write_paragraph()
                formatter.write(f"{name}\n" if " " in name else f"{name}:\n")
                formatter.indent()
                formatter.write_dl(records)
                formatter.dedent()

    def _takes(self, name: str) -> bool:
        """Tell whether there is a parameter of that name."""
        return any(parameter.name == name for parameter in self.params)


def show_all(context: typer.Context, asked: bool) -> None:
    """Print the help with all options and exit: the callback of ``--help-all``."""
    if asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _refusal(error: typer.BadParameter) -> str:
    """Return Typer's message in our wording: some versions let pydantic write it."""
    message = error.message.removeprefix("Value error, ")
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if found and message.startswith("Input should"):
        message = f"{found[0]['input']!r} {message.removeprefix('Input ')}"
    given, one_of, choices = message.partition(" is not one of ")
    if not one_of:
        return message
    return or_nearest(message.rstrip("."), given.strip("'"), re.findall("'(.*?)'", choices))
