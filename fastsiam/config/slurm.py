"""Settings of a job for SLURM."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .setting import Config, require, setting

_SEEDS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig(Config):
    """Job: what SLURM is asked for beside --nodes and --gpus."""

    time: str = setting(
        "24:00:00",
        "Time limit of a job, as for sbatch: 24:00:00 or 2-12 (days-hours); the next job "
        "continues.",
    )
    partition: str = setting("", "Partition to submit to. Default: the cluster's.")
    account: str = setting("", "Account that the job is charged to. Default: yours.")
    name: str = setting("fastsiam", "Name of the job.")
    cpus: int = setting(12, "CPU cores of each rank, which load its images.", at_least=1)
    mem: str = setting(
        "", "Memory of each machine, such as 200G, or 0 for all of it. Default: the cluster's."
    )
    warning: int = setting(
        120, "Seconds before the time limit at which the run saves and is requeued.", at_least=1
    )
    requeues: int = setting(
        100, "Largest number of times that the job is requeued; 0: never.", at_least=0
    )
    seeds: str = setting(
        "", "Array of runs with these seeds, such as 0-4 or 0,2, each in its own folder."
    )
    sbatch: str = setting("", 'Other options of sbatch, such as "--constraint=h100 --exclusive".')

    def check(self) -> None:
        """Check what the script depends on; sbatch checks its own options."""
        require(
            not self.seeds or bool(_SEEDS.fullmatch(self.seeds)),
            f"seeds are numbers and ranges, such as 0-4 or 0,2, not {self.seeds!r}",
        )
        for option in ("time", "name", "partition", "account", "mem"):
            value = getattr(self, option)
            require(not re.search(r"\s", value), f"{option} has no spaces: {value!r}")
        require("\n" not in self.sbatch, f"sbatch is one line, not {self.sbatch!r}")
