"""The command line: wiring only; one file for what commands are about.

torch is imported by the commands that need it, never for ``--help``.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, NoReturn

import typer

import fastsiam
from fastsiam.cli import bench, convert, evaluate, export, look, train
from fastsiam.errors import FastSiamError, Interrupted

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: in 80 columns rich cuts the options' names
    help="SimSiam pre-training at the speed of the hardware.",
)
for _commands in (train, evaluate, export, look):
    app.add_typer(_commands.app)
app.add_typer(convert.app, name="convert")
app.add_typer(evaluate.measures, name="eval")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line; an error of the user's world is one line and exit code 1."""
    try:
        app()
    except FastSiamError as error:
        if os.environ.get("FASTSIAM_DEBUG"):
            raise
        rank = os.environ.get("RANK", "0")
        if isinstance(error, Interrupted):
            if rank == "0":
                print(_line(error), file=sys.stderr)
            _leave(error.exit_code)
        who = "error" if rank == "0" else f"error on rank {rank}"
        print(f"{who}: {_line(error)}", file=sys.stderr)
        _leave(1)
    except RuntimeError as error:
        from fastsiam.distributed import peer_is_gone

        if not peer_is_gone(error):
            raise
        _leave(1)


def _line(error: Exception) -> str:
    """Return an error's message, and in brackets what was noted on its way up."""
    return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])


def _leave(code: int) -> NoReturn:
    """Exit; as one of several ranks at once, for parting from the others would wait for them."""
    sys.stderr.flush()
    if "LOCAL_RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def _version(show: bool) -> None:
    if show:
        print(f"fastsiam {fastsiam.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.basicConfig(format="%(message)s")
        logging.getLogger("fastsiam").setLevel(logging.INFO)
