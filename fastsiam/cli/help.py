"""``--help`` as plain text: options in sections, and summaries in full; refusals of values.

Typer keeps an option's section in its ``rich_help_panel``, which only its Rich output draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from fastsiam.config.checks import or_nearest

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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options of no section, and then the sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            name = getattr(parameter, "rich_help_panel", None) or kind
            if record := parameter.get_help_record(ctx):
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                formatter.write_paragraph()
                formatter.write(f"{name}\n" if " " in name else f"{name}:\n")
                formatter.indent()
                formatter.write_dl(records)
                formatter.dedent()


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


class Commands(typer.Typer):
    """A Typer app whose help is this module's."""

    def __init__(self, *, cls: type[Group] = Group, **how: Any) -> None:
        super().__init__(cls=cls, **how)

    def command(  # type: ignore[override]
        self, name: str | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return the decorator of a command."""
        return super().command(name, cls=Command)
