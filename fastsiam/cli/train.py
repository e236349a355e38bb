"""``fastsiam train``, and the related commands ``demo``, ``config`` and ``slurm``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from fastsiam.cli.options import Commands, settings_of_resumed, usage_errors
from fastsiam.config import TrainConfig
from fastsiam.config.run import SlurmConfig
from fastsiam.config.setting import require
from fastsiam.config.settings_files import to_toml
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
    except KeyboardInterrupt:  # during imports, or before the trainer handles signals
        raise Interrupted(
            "SIGINT: stopped before the first step; there is nothing to save", signal.SIGINT
        ) from None


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the images, the run and the report.")
    ] = Path("runs/demo"),
) -> None:
    """Generate small images, train on them, and show that the features beat raw pixels.

    Takes a few minutes on a laptop.
    """
    from fastsiam.demo import run_demo

    run_demo(out)


@app.command("config")
def write_config(recipe: str, config: TrainConfig) -> None:
    """Print the settings of a recipe, changed by flags, as a commented file for train --config."""
    print(to_toml(config, recipe=recipe), end="")


class _JobsRunConfig(TrainConfig):
    """Settings of a run whose SLURM job determines the rendezvous."""

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        return super().from_flags({**flags, "rendezvous": flags["rendezvous"] or "node:29500"})

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a rendezvous is given."""
        require("rendezvous" not in given, "the job chooses the rendezvous; leave out --rendezvous")
        super().check_given(given)


@app.command()
def slurm(
    recipe: str,
    config: _JobsRunConfig,
    job: SlurmConfig,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the job with submitit and print its number.")
    ] = False,
    scripts: Annotated[
        Path, typer.Option(help="Folder in which --submit saves the scripts.")
    ] = Path("slurm"),
) -> None:
    """Print a job script for sbatch that runs train, and resumes when the job is requeued."""
    from fastsiam.distributed.slurm import slurm_script
    from fastsiam.distributed.slurm import submit as submit_script
    from fastsiam.run import checkpoint
    from fastsiam.train.command import check_shares
    from fastsiam.train.start import find_start

    with usage_errors():
        for world in config.run.worlds:
            check_shares(config, world)
    resumed = settings_of_resumed(config.run)
    if resumed and checkpoint.exists(out := Path(config.run.out)):
        find_start(config, out, restarts=True)
    script = slurm_script(recipe, config, job, resumed=resumed)
    print(submit_script(script, folder=scripts) if submit else script.rstrip())
