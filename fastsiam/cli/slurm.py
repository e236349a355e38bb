"""``fastsiam slurm``: a training run as a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fastsiam.cli.options import Commands, settings_of_resumed
from fastsiam.config import TrainConfig
from fastsiam.config.run import SlurmConfig

app = Commands()

_LATER = "node:29500"
"""Stands for where machines meet, which the job will know."""


def _to_meet_later(flags: Mapping[str, Any]) -> TrainConfig:
    return TrainConfig.from_flags({**flags, "rendezvous": flags["rendezvous"] or _LATER})


@app.command(build=_to_meet_later)
def slurm(
    recipe: str,
    config: TrainConfig,
    job: SlurmConfig,
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit it through submitit, and print its number.")
    ] = False,
    scripts: Annotated[
        Path, typer.Option(help="Folder in which --submit keeps the scripts.")
    ] = Path("slurm"),
) -> None:
    """Print a job for sbatch that trains as train does, and continues when it is requeued."""
    from fastsiam.distributed.slurm import slurm_script
    from fastsiam.distributed.slurm import submit as submit_script

    script = slurm_script(recipe, config, job, resumed=settings_of_resumed(config.run))
    print(submit_script(script, folder=scripts) if submit else script.rstrip())
