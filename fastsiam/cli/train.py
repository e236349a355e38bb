"""``fastsiam train``, and the demo of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastsiam.cli.help import Commands
from fastsiam.cli.options import settings_command
from fastsiam.config import TrainConfig
from fastsiam.errors import Interrupted

app = Commands()


def train(recipe: str, config: TrainConfig) -> None:
    """Train a backbone without labels. The defaults shown are those of --recipe and --method."""
    try:
        _train(recipe, config)
    except KeyboardInterrupt:
        raise Interrupted(
            "SIGINT: stopped before a step was taken; there is nothing to save", exit_code=130
        ) from None


def _train(recipe: str, config: TrainConfig) -> None:
    from fastsiam import distributed
    from fastsiam.jobs import train as jobs
    from fastsiam.jobs.restart import ranks_of

    asked = config.run.gpus * config.run.nodes
    world = int(os.environ["WORLD_SIZE"]) if distributed.is_worker() else asked
    try:
        jobs.preflight(config, world=world)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if world > 1 and not distributed.is_worker():
        with ranks_of(config, recipe, sys.argv[1:]) as work:
            sys.exit(distributed.launch_ranks(work, config.run))
    jobs.train_here(config, recipe)


app.command()(settings_command(train))


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the images, the run and the report.")
    ] = Path("runs/demo"),
) -> None:
    """Make small images, train on them, and show that the features beat raw pixels.

    Takes a few minutes on a laptop.
    """
    from fastsiam.jobs.demo import run_demo

    run_demo(out)
