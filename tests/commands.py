"""Parse fastsiam command lines without running them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer.main

from fastsiam.cli import app


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(arguments: Sequence[str]) -> None:
    """Parse the arguments after ``fastsiam``.

    Raises:
        click.UsageError: There is no such command or option, or a value is invalid.
    """
    words, command = list(arguments), program()
    while commands := getattr(command, "commands", None):
        if command.name == "bench" and (not words or words[0].startswith("-")):
            words = ["all", *words]
        name, *words = words
        assert name in commands, f"there is no command {name}"
        command = commands[name]
    command.make_context(command.name, words)
