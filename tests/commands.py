"""Parse fastsiam command lines without running them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

import typer.main
from typer.testing import CliRunner

from fastsiam.cli import app
from fastsiam.cli.options import Command, Commands
from fastsiam.config import TrainConfig


@cache
def program() -> Any:
    return typer.main.get_command(app)


def check_usage(arguments: Sequence[str]) -> None:
    """Parse the arguments after ``fastsiam``.

    Raises:
        click.UsageError: There is no such command or option, or a value is invalid.
    """
    with mock.patch.object(Command, "invoke"):
        program().main(list(arguments), standalone_mode=False)


def invoke(*arguments: str, code: int = 0) -> tuple[list[tuple[str, TrainConfig]], str]:
    """Pass arguments to a command that takes settings; return its calls and its output."""
    got: list[tuple[str, TrainConfig]] = []
    command = Commands(rich_markup_mode=None)

    @command.command("test")
    def note(recipe: str, config: TrainConfig) -> None:
        got.append((recipe, config))

    result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == code, result.output
    return got, " ".join(result.output.split())


def parse(*arguments: str) -> tuple[str, TrainConfig]:
    """Return the recipe and the settings that a command gets."""
    return invoke(*arguments)[0][0]
