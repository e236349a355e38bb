"""``fastsiam train``, and the demo of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastsiam.cli.options import Commands, usage_errors
from fastsiam.config import TrainConfig
from fastsiam.errors import Interrupted

app = Commands()


@app.command()
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
    from fastsiam.train import command

    machines = range(config.run.min_nodes, config.run.max_nodes + 1)
    worlds = [number * config.run.gpus for number in machines]
    if distributed.is_worker():
        worlds = [int(os.environ["WORLD_SIZE"])]
    with usage_errors():
        if config.run.max_nodes > 1 and not config.run.out:
            raise ValueError("several machines need --out: a run folder that all of them share")
        command.preflight(config, world=worlds[-1])
        for world in worlds[:-1]:
            command.check_shares(config, world)
    if worlds[-1] > 1 and not distributed.is_worker():
        sys.exit(command.train_on_ranks(config, recipe, sys.argv[1:]))
    command.train_here(config, recipe)


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
