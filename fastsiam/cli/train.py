"""``fastsiam train``, the demo of it, and its settings as a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import TrainConfig
from fastsiam.config.files import to_toml
from fastsiam.errors import Interrupted

app = Commands()


@app.command()
def train(recipe: str, config: TrainConfig) -> None:
    """Train a backbone without labels. The defaults shown are those of --recipe and --method."""
    try:
        from fastsiam import distributed
        from fastsiam.train import command

        with usage_errors():
            ranks = command.check_run(config)
        if ranks > 1 and not distributed.is_worker():
            sys.exit(command.train_on_ranks(config, recipe, sys.argv[1:]))
        command.train_here(config, recipe)
    except KeyboardInterrupt:
        raise Interrupted(
            "SIGINT: stopped before a step was taken; there is nothing to save", exit_code=130
        ) from None


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the images, the run and the report.")
    ] = Path("runs/demo"),
) -> None:
    """Make small images, train on them, and show that the features beat raw pixels.

    Takes a few minutes on a laptop.
    """
    from fastsiam.demo import run_demo

    run_demo(out)


@app.command("config")
def write_config(recipe: str, config: TrainConfig) -> None:
    """Print a settings file with comments, for train --config: the recipe's, changed by flags."""
    print(to_toml(config, recipe=recipe), end="")
